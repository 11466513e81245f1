"""Random lives of jobs at the level of the Lua scripts: workers of two arithmetics, stale owners, repeated calls,
leases that lapse, rq's cleanup.

A model in plain Python says what each call must answer and what the server must hold afterwards: one result a job, no
write by anyone who lost the job, terminal states that never change again, registries that agree with the statuses.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from rq import Queue
from rq.registry import (
    CanceledJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    StartedJobRegistry,
    clean_registries,
)

from batonq.producer import Producer, keys, serializer
from batonq.producer.schema import FUNCTION
from batonq.worker.messages import pack_ids
from batonq.worker.scripts import (
    Abilities,
    Claim,
    Committed,
    ContextCommit,
    ContextEnd,
    Ending,
    Finished,
    Scripts,
    SetAside,
)
from tests.support.servers import server

QUEUE = "machine"
#: Name → numerics: the first two compute alike.
WORKERS = {"a": "x", "b": "x", "c": "y"}


@dataclass
class ModelJob:
    status: str = "queued"
    #: The claim that owns the job now, by its execution id.
    owner: str | None = None
    pinned: bool = False
    #: Of the tokens, and whether they bind it.
    numerics: str = ""
    exact: bool = False
    #: It may go on with any numerics, once.
    free: bool = False
    aside: bool = False
    tokens: list[int] = field(default_factory=list)
    ended_by: str | None = None

    def fits(self, worker: str) -> bool:
        return not self.tokens or self.free or self.numerics == WORKERS[worker]


class JobLives(RuleBasedStateMachine):
    connection: redis.Redis
    scripts: Scripts

    @initialize()
    def start(self) -> None:
        self.connection.flushall()
        self.queue = Queue(QUEUE, connection=self.connection, serializer=serializer)
        self.producer = Producer(self.connection)
        self.jobs: dict[str, ModelJob] = {}
        self.claims: list[tuple[str, Claim]] = []
        self.count = 0

    @rule(front=st.booleans())
    def enqueue(self, front: bool) -> None:
        job_id = f"j{len(self.jobs)}"
        self.queue.enqueue(FUNCTION, prompt="x", job_id=job_id, at_front=front, failure_ttl=600, result_ttl=600)
        self.jobs[job_id] = ModelJob()

    @rule(pick=st.integers(0, 99))
    def push_an_id_again(self, pick: int) -> None:
        """What two reapers or a careless operator do."""
        if self.jobs:
            self.connection.rpush(self.queue.key, list(self.jobs)[pick % len(self.jobs)])

    @rule(worker=st.sampled_from(list(WORKERS)), count=st.integers(1, 3))
    def claim(self, worker: str, count: int) -> None:
        executions = [f"e{self.count + i}" for i in range(count)]
        self.count += count
        listed = {m.decode() for m in self.connection.lrange(self.queue.key, 0, -1)}
        queued = [job for job_id, job in self.jobs.items() if job.status == "queued" and job_id in listed]
        found = self.scripts.claim([QUEUE], worker, Abilities(WORKERS[worker], "", 1), executions, time.time(), 480)
        assert found is not None
        assert len(found.claims) == min(count, sum(job.fits(worker) for job in queued))
        for left in found.aside:
            assert left == SetAside(left.job_id, "numerics")
            assert not self.jobs[left.job_id].fits(worker)
            self.jobs[left.job_id].aside = True
        for claim in found.claims:
            job = self.jobs[claim.ownership.job_id]
            assert job.status == "queued"
            assert job.fits(worker)
            job.free = False
            assert claim.contexts[0].tokens == pack_ids(job.tokens)
            assert ("digest" in claim.contexts[0].fields) == job.pinned
            job.status, job.owner = "started", claim.ownership.execution_id
            self.claims.append((worker, claim))

    def any_claim(self, pick: int) -> tuple[str, Claim, ModelJob, bool] | None:
        """A claim ever made, its job, and whether it still owns it."""
        if not self.claims:
            return None
        worker, claim = self.claims[pick % len(self.claims)]
        job = self.jobs[claim.ownership.job_id]
        return worker, claim, job, job.owner == claim.ownership.execution_id

    @rule(pick=st.integers(0, 99), exact=st.booleans())
    def pin(self, pick: int, exact: bool) -> None:
        if (found := self.any_claim(pick)) and not found[2].pinned:
            worker, claim, job, owned = found
            fields = {"digest": "d", "state": "WAITING", "exact": "require" if exact else "prefer"}
            fields |= {"numerics": WORKERS[worker], "min_reader": "1"}
            assert self.scripts.pin([(claim.ownership, False, [(claim.ownership.job_id, fields)])]) == [owned]
            if owned:
                job.pinned, job.tokens, job.numerics, job.exact = True, [], WORKERS[worker], exact

    @rule(
        pick=st.integers(0, 99),
        back=st.integers(0, 3),
        new=st.lists(st.integers(0, 9), max_size=3),
        plain=st.booleans(),
        lie=st.booleans(),
    )
    def commit(self, pick: int, back: int, new: list[int], plain: bool, lie: bool) -> None:
        """Tokens from where the server is or, as after a lost reply, from a little before; or something untrue."""
        if not (found := self.any_claim(pick)):
            return
        worker, claim, job, owned = found
        start = max(0, len(job.tokens) - back)
        tokens = [*job.tokens[start:], *new]
        contradiction = lie and start < len(job.tokens)
        if contradiction:
            tokens[0] += 1
        gap = lie and not contradiction
        start += gap
        fields = {} if plain else {"state": "RUNNING", "numerics": WORKERS[worker]}
        news = ContextCommit(claim.ownership.job_id, start, pack_ids(tokens), b"", fields)
        (outcome,) = self.scripts.commit([(claim.ownership, [news])])
        if not owned:
            assert outcome is Committed.LOST
        elif contradiction or gap:
            assert outcome is Committed.CONTRADICTION
        else:
            assert outcome is Committed.DONE
            job.tokens += new
            if not plain:
                job.numerics = WORKERS[worker]
            elif not job.numerics:  # nobody said whose they are
                job.free = True

    @rule(pick=st.integers(0, 99), failed=st.booleans(), repeat=st.booleans())
    def finish(self, pick: int, failed: bool, repeat: bool) -> None:
        if not (found := self.any_claim(pick)):
            return
        worker, claim, job, owned = found
        status = "failed" if failed else "finished"
        ending = Ending(
            claim.ownership,
            QUEUE,
            worker,
            status,
            {"type": 1},
            time.time(),
            1.0,
            600,
            "client",
            [ContextEnd(claim.ownership.job_id, 0, {"state": "FINISHED"})],
        )
        mine = owned or job.ended_by == claim.ownership.execution_id
        for _ in range(1 + repeat):
            assert self.scripts.finish([ending]) == [Finished(mine, False, False)]
        if owned:
            job.status, job.owner, job.ended_by, job.tokens = status, None, claim.ownership.execution_id, []

    @rule(picks=st.lists(st.integers(0, 99), min_size=1, max_size=3), crashed=st.booleans())
    def release(self, picks: list[int], crashed: bool) -> None:
        for pick in picks:
            if found := self.any_claim(pick):
                worker, claim, job, owned = found
                dead = [claim.ownership] if crashed else []
                assert self.scripts.release(worker, [claim.ownership], crashed=dead) == [owned]
                if owned:
                    job.status, job.owner = "queued", None
                    assert self.connection.lindex(self.queue.key, 0) == claim.ownership.job_id.encode()

    @rule(worker=st.sampled_from(list(WORKERS)))
    def renew(self, worker: str) -> None:
        self.connection.hincrby(keys.lease(QUEUE), worker, 1)

    @rule(worker=st.sampled_from(list(WORKERS)), late=st.booleans())
    def reap(self, worker: str, late: bool) -> None:
        """Somebody saw the lease unchanged for long enough; or it has changed at the last moment."""
        held = self.connection.hget(keys.lease(QUEUE), worker)
        seen = None if held is None else held.decode()
        if late:
            self.renew(worker)
        taken = self.scripts.reap(QUEUE, worker, seen)
        if late:
            assert taken is None
            return
        owned = {
            claim.ownership.job_id
            for name, claim in self.claims
            if name == worker and self.jobs[claim.ownership.job_id].owner == claim.ownership.execution_id
        }
        assert set(taken or []) == owned
        for job_id in owned:
            self.jobs[job_id].status, self.jobs[job_id].owner = "queued", None

    @rule(worker=st.sampled_from(list(WORKERS)), grace=st.sampled_from([0, 3600]))
    def recall(self, worker: str, grace: int) -> None:
        back = set(self.scripts.recall(QUEUE, Abilities(WORKERS[worker], "", 1), grace))
        for job_id, job in self.jobs.items():
            waits = job.aside and job.status == "queued"
            tolerated = grace == 0 and not job.exact
            assert (job_id in back) == (waits and (job.fits(worker) or tolerated))
            if job_id in back:
                job.free = job.free or not job.fits(worker)
            job.aside = waits and job_id not in back

    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        if self.jobs:
            job_id, job = list(self.jobs.items())[pick % len(self.jobs)]
            live = job.status in ("queued", "started")
            assert self.producer.cancel(job_id) == live
            if live:
                job.status, job.owner, job.tokens = "canceled", None, []

    @rule()
    def rq_cleans_up(self) -> None:
        clean_registries(self.queue)

    @invariant()
    def server_agrees(self) -> None:
        started = {
            f"{job_id}:{job.owner}" for job_id, job in getattr(self, "jobs", {}).items() if job.status == "started"
        }
        if not hasattr(self, "queue"):
            return
        assert {m.decode() for m in self.connection.zrange(keys.started(QUEUE), 0, -1)} == started
        owned = {m.decode() for name in WORKERS for m in self.connection.smembers(keys.worker_executions(name))}
        assert owned == started
        for status, registry in (
            ("finished", FinishedJobRegistry),
            ("failed", FailedJobRegistry),
            ("canceled", CanceledJobRegistry),
        ):
            expected = {job_id for job_id, job in self.jobs.items() if job.status == status}
            assert set(registry(queue=self.queue).get_job_ids(cleanup=False)) == expected
        assert StartedJobRegistry(queue=self.queue).get_job_count(cleanup=True) == len(started)
        listed = {m.decode() for m in self.connection.lrange(self.queue.key, 0, -1)}
        aside = {m.decode() for m in self.connection.zrange(keys.aside(QUEUE), 0, -1)}
        for job_id, job in self.jobs.items():
            assert self.connection.hget(keys.job(job_id), "status") == job.status.encode()
            assert self.connection.xlen(keys.results(job_id)) == (job.ended_by is not None)
            assert (self.connection.get(keys.tokens(job_id)) or b"") == pack_ids(job.tokens)
            assert job.status != "queued" or job_id in listed or (job.aside and job_id in aside)
            for name in (keys.job(job_id), keys.results(job_id), keys.context(job_id)):
                if job.status not in ("queued", "started"):
                    assert self.connection.ttl(name) != -1, f"{name} stays for ever"


@pytest.fixture(scope="module")
def connection() -> Iterator[redis.Redis]:
    with (
        tempfile.TemporaryDirectory() as directory,
        server(Path(directory)) as running,
        redis.Redis.from_url(running.url) as client,
    ):
        yield client


def test_random_lives(connection: redis.Redis) -> None:
    JobLives.connection, JobLives.scripts = connection, Scripts(connection)
    case = JobLives.TestCase
    case.settings = settings(
        max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case("runTest").runTest()
