"""Workers that are killed or frozen again and again, under a supervisor: one output, one commit, one pass.

The full two minutes are `make soak`'s; the suite runs a short one.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
import redis

from batonq.producer import keys
from batonq.producer.schema import PromptJob
from batonq.worker import step_log
from tests.support.fleets import Fleet, calm_outcomes, fleet, jobs, tiny_model

LEASE = 2.0
SLOW = {"step_seconds": 0.01}
OPTIONS = ("--lease", str(LEASE), "--log-level", "warning")

#: Jobs, most tokens of each, and seconds of chaos.
SHORT, LONG = (32, 300, 9.0), (200, 900, 120.0)
sizes = pytest.mark.parametrize("size", [SHORT, pytest.param(LONG, marks=pytest.mark.soak)], ids=["short", "long"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@sizes
def test_killed_at_random(tmp_path: Path, model: Path, size: tuple[int, int, float]) -> None:
    count, most_tokens, seconds = size
    made, chance = jobs(count, most_tokens), random.Random(5)
    with fleet(tmp_path / "chaos", *OPTIONS, model=model, **SLOW) as wild:
        with redis.Redis.from_url(wild.valkey.url) as connection, wild.supervised(3):
            wild.submit(made)
            over = time.monotonic() + seconds
            while time.monotonic() < over:
                time.sleep(chance.uniform(0.5, 3.0))  # the chaos itself: kills come at any moment
                wild.kill(chance.randrange(3), chance.choice(["child", "parent", "both"]))
            finished = count - wild.unfinished(connection, made)
            mid_decode, owners = takeovers(wild, made)
            wild.await_end(made, 600)
        sys.stdout.write(
            f"\nkills: {dict(wild.kill_kinds)}; meanwhile {finished} of {count} jobs finished, {mid_decode} takeovers "
            f"in mid-decode, {sum(n >= 3 for n in owners)} jobs with three owners or more\n"
        )
        if size == LONG:
            assert mid_decode >= 100
            assert sum(n >= 3 for n in owners) >= 10
            assert finished >= count / 2
        assert mid_decode > 0
        check_one_pass(wild, made)
        assert wild.outcomes(made) == calm_outcomes(tmp_path / "calm", model, made)


@sizes
def test_frozen_past_the_lease(tmp_path: Path, model: Path, size: tuple[int, int, float]) -> None:
    """A worker wakes up long after others have taken its jobs over: whatever it still says is refused."""
    count, most_tokens, seconds = size
    made, chance = jobs(count, most_tokens), random.Random(6)
    with fleet(tmp_path / "frozen", "--lease", "0.6", "--log-level", "warning", model=model, **SLOW) as wild:
        with redis.Redis.from_url(wild.valkey.url) as connection, wild.supervised(3):
            wild.submit(made)
            over = time.monotonic() + seconds
            while time.monotonic() < over and wild.unfinished(connection, made):
                victim = wild.workers[chance.randrange(3)]
                if not connection.scard(keys.worker_executions(victim.name)):
                    continue
                child = victim.child() if chance.random() < 0.5 else None
                frozen = [victim.process.pid, *([child.pid] if child else [])]
                for pid in frozen:
                    os.kill(pid, signal.SIGSTOP)
                time.sleep(chance.uniform(0.8, 2.0))  # past the lease
                for pid in frozen:
                    os.kill(pid, signal.SIGCONT)
                time.sleep(chance.uniform(0.0, 0.5))
            wild.await_end(made, 600)
        assert "its lease has lapsed" in wild.log
        assert "no longer ours" in wild.log
        assert wild.outcomes(made) == calm_outcomes(tmp_path / "calm", model, made)


def takeovers(wild: Fleet, made: list[PromptJob]) -> tuple[int, list[int]]:
    """Claims of jobs that had tokens, and how many owners each job has had."""
    histories = [wild.history(job) for job in made]
    claims = [[tokens for event, _, tokens in history if event == "claimed"] for history in histories]
    return sum(tokens > 0 for each in claims for tokens in each), [1 + len(each) for each in claims]


def check_one_pass(wild: Fleet, made: list[PromptJob]) -> None:
    """Nothing committed was drawn again, and what was drawn twice is the same. Prints how old it was at the kill."""
    drawn: dict[tuple[str, int], list[tuple[float, int, int]]] = defaultdict(list)
    firsts: dict[str, dict[int, int]] = defaultdict(dict)
    for path in wild.samples.iterdir():
        pid = int(path.name.split("-")[0])
        for sample in step_log.read(path):
            drawn[sample.context_id, sample.position].append((sample.at, pid, sample.token_id))
            firsts[sample.context_id].setdefault(pid, sample.position)
    ages = []
    for (context_id, position), samples in drawn.items():
        assert len({token for _, _, token in samples}) == 1, f"{context_id}: two tokens at {position}"
        for at, pid, _ in sorted(samples)[:-1]:
            assert pid in wild.kills, f"{context_id}: {position} was drawn twice, and process {pid} wasn't killed"
            ages.append(wild.kills[pid] - at)
    for job in made:
        if job.n == 1:
            committed = {0} | {tokens for event, _, tokens in wild.history(job) if event == "claimed"}
            assert set(firsts[str(job.id)].values()) <= committed, f"{job.id}: committed tokens were drawn again"
    if ages:
        total = sum(map(len, drawn.values()))
        sys.stdout.write(
            f"{len(ages)} of {total} samples were drawn again; at the kill they were "
            f"{statistics.median(ages) * 1e3:.0f} ms old (median), {max(ages) * 1e3:.0f} ms at most\n"
        )
