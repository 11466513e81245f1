"""The channel between worker and engine process: who is woken by what, and when for a commit."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonq.worker.child import CommitClock
from batonq.worker.messages import Channel, Step


@dataclass
class Pair:
    """Both ends, and the bell's end to listen to."""

    parent: Channel
    child: Channel
    bell: int

    def rung(self, seconds: float) -> bool:
        return bool(select.select([self.bell], [], [], seconds)[0])


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    bell, to_ring = os.pipe()
    both = Pair(Channel(ours), Channel(theirs, to_ring), bell)
    yield both
    both.parent.close()
    both.child.close()
    os.close(bell)
    os.close(to_ring)


def step(number: int, size: int = 0) -> Step:
    return Step(number, 0.0, b"", bytes(size), [])


def test_only_what_cannot_wait_rings(pair: Pair) -> None:
    pair.child.send(step(1), ring=False)
    assert not pair.rung(0)
    pair.child.send(step(2))
    assert pair.rung(0)
    assert pair.parent.receive(wait=False) == [step(1), step(2)]
    assert pair.parent.receive(wait=False) == []


def test_a_full_socket_rings_and_loses_nothing(pair: Pair) -> None:
    """More than a socket holds, of which nothing would ring by itself."""
    sent = [step(number, 100_000) for number in range(20)]

    def send() -> None:
        for message in sent:
            pair.child.send(message, ring=False)

    sender = threading.Thread(target=send)
    sender.start()
    received: list[object] = []
    while len(received) < len(sent):
        if not received:
            assert pair.rung(60)
        received += pair.parent.receive(wait=True)
    sender.join()
    assert received == sent


def test_the_last_words_are_heard_before_the_end(pair: Pair) -> None:
    pair.child.send(step(1, 300_000 // 4), ring=False)
    pair.child.close()
    heard: list[object] = []
    while not pair.parent.closed:
        heard += pair.parent.receive(wait=True)
    assert heard == [step(1, 300_000 // 4)]


#: Steps: how many milliseconds pass before each, how many it takes, and whether it makes news.
STEPS = st.lists(st.tuples(st.integers(0, 120), st.integers(1, 120), st.booleans()), max_size=60)


@given(STEPS)
def test_what_is_not_committed_yet_is_no_older_than_an_interval(steps: list[tuple[int, int, bool]]) -> None:
    clock, now, last, untold = CommitClock(50), 0, -1000, False
    for pause, took, news in steps:
        began, now = now + pause, now + pause + took
        untold |= news
        if clock.is_due(began, now, news=news):
            assert untold
            assert now - last >= 50 - took / 2, "the end of the next step is nearer"
            last, untold = now, False
        else:
            assert not untold or now - last < 50


@pytest.mark.parametrize(("took", "steps"), [(1, 50), (10, 5), (16, 3), (24, 2), (34, 1), (48, 1), (76, 1), (400, 1)])
def test_a_commit_comes_every_so_many_steps_and_never_within_one(took: int, steps: int) -> None:
    clock = CommitClock(50)
    due = [at for at in range(1000) if clock.is_due(at * took, (at + 1) * took, news=True)]
    assert due == list(range(0, 1000, steps))
