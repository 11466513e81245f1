"""Leases: what a watch makes of counters and its clock, and what a worker's own lease says when it is not renewed."""

from __future__ import annotations

import signal
from pathlib import Path

import redis
from hypothesis import given
from hypothesis import strategies as st

from batonq.producer import keys
from batonq.producer.embedded import EmbeddedServer
from batonq.worker.lease import Lease, Watch
from tests.support.servers import eventually
from tests.support.workers import QUEUE, worker

SECONDS = 10.0

#: Time that passes, then what each of three workers does: bump its counter, nothing, or vanish.
_moves = st.tuples(st.floats(0.0, 4.0), st.lists(st.sampled_from(["bump", "rest", "leave"]), min_size=3, max_size=3))


@given(st.lists(_moves, max_size=40))
def test_only_what_stood_still_for_a_lease_has_lapsed(moves: list[tuple[float, list[str]]]) -> None:
    now = 0.0
    watch = Watch(SECONDS, lambda: now)
    counters: dict[str, int] = {}
    #: When the watch first saw the present counter of each.
    first_seen: dict[str, tuple[int, float]] = {}
    for passed, acts in moves:
        now += passed
        for name, act in zip("abc", acts, strict=True):
            if act == "bump":
                counters[name] = counters.get(name, 0) + 1
            elif act == "leave":
                counters.pop(name, None)
        if passed > SECONDS / 4:  # for so long nobody looked: who is to say who renewed?
            first_seen.clear()
        lapsed = watch.lapsed({name: str(counter) for name, counter in counters.items()})
        for name in set(first_seen) - set(counters):
            del first_seen[name]
        for name, counter in counters.items():
            if first_seen.get(name, (None,))[0] != counter:
                first_seen[name] = counter, now
        assert lapsed == {name: str(c) for name, (c, since) in first_seen.items() if now - since >= SECONDS}


def test_a_lease_is_held_while_it_is_renewed_and_given_up_at_the_end(
    valkey: EmbeddedServer, connection: redis.Redis
) -> None:
    lease = Lease(valkey.url, "w", ["a", "b"], 0.4)
    assert not lease.held
    lease.start()
    assert lease.held
    for queue in ("a", "b"):
        before = int(connection.hget(keys.lease(queue), "w") or 0)
        eventually(lambda q=queue, b=before: int(connection.hget(keys.lease(q), "w") or 0) > b, "it is renewed")  # type: ignore[misc]
        assert 0 < connection.ttl(keys.lease(queue)) <= 480
    valkey.process.send_signal(signal.SIGSTOP)
    eventually(lambda: not lease.held, "a lease that can't be renewed ends")
    valkey.process.send_signal(signal.SIGCONT)
    eventually(lambda: lease.held, "it is held again once it can be")
    lease.give_up()
    lease.stop()
    assert not connection.hexists(keys.lease("a"), "w")


def test_executions_of_a_worker_without_a_lease_are_taken_over(
    valkey: EmbeddedServer, connection: redis.Redis, tmp_path: Path
) -> None:
    """As after a server came back older than it was, or where a worker's records were deleted by hand."""
    job = {"status": "started", "origin": QUEUE, "worker_name": "ghost", "batonq_execution": "e", "batonq_epoch": 1}
    connection.hset(keys.job("orphan"), mapping=job)
    connection.zadd(keys.started(QUEUE), {"orphan:e": "inf"})
    with worker(valkey.url, "w", "--lease", "0.4", log=tmp_path / "log"):
        eventually(lambda: connection.hget(keys.job("orphan"), "status") == b"failed", "it is claimed, and refused")
    assert "it has no lease" in (tmp_path / "log").read_text()
    assert connection.zcard(keys.started(QUEUE)) == 0
