"""Ends of jobs and what follows them: retries, deadlines, dependents, callbacks, webhooks, times to live, order."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis
from rq import Queue, Retry
from rq.job import Callback, Dependency, Job
from rq.rate_limit import RateLimit
from rq.registry import ScheduledJobRegistry
from rq.repeat import Repeat
from rq.webhook import Webhook

from batonq.engine.sampling_params import SamplingParams
from batonq.producer import keys, serializer
from batonq.producer.embedded import EmbeddedServer
from batonq.producer.schema import FUNCTION
from batonq.worker.scripts import Claim, Ending, Finished, Scripts
from tests.support import callbacks
from tests.support.claims import claim_jobs
from tests.support.definition import alone
from tests.support.null_engine import POISON
from tests.support.redis_keys import forever, registries
from tests.support.servers import eventually
from tests.support.workers import QUEUE, error_of, result_of, status, worker


def enqueue(queue: Queue, prompt: str = "x", *, max_tokens: int = 5, **options: Any) -> Job:
    fields = {name: options.pop(name) for name in ("priority", "deadline", "model") if name in options}
    sampling = {"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens}
    return queue.enqueue(FUNCTION, kwargs={"prompt": prompt, "sampling": sampling, **fields}, **options)


def burst(valkey: EmbeddedServer, tmp_path: Path, *options: str, **engine: float) -> str:
    """Run a worker until its queues are empty; its log."""
    with worker(valkey.url, "w", "--burst", *options, log=tmp_path / "log", **engine) as running:
        assert running.wait() == 0
    return (tmp_path / "log").read_text()


def claim(scripts: Scripts, worker_name: str = "w") -> Claim:
    (claimed,) = claim_jobs(scripts, [QUEUE], worker_name)
    return claimed


def failure(claimed: Claim, worker_name: str = "w") -> Ending:
    return Ending(
        claimed.ownership,
        QUEUE,
        worker_name,
        "failed",
        {"type": 2},
        time.time(),
        1.0,
        600,
        error=("e", "m"),
        transient=True,
    )


# ── tries ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("front", [False, True])
def test_a_retry_without_an_interval(front: bool, connection: redis.Redis, queue: Queue) -> None:
    scripts = Scripts(connection)
    job = enqueue(queue, retry=Retry(max=2, enqueue_at_front=front))
    other = enqueue(queue)
    for left in (1, 0):
        connection.lrem(queue.key, 0, other.id)
        claimed = claim(scripts)
        connection.rpush(queue.key, other.id)
        for _ in range(2):  # as after a lost reply
            assert scripts.finish([failure(claimed)]) == [Finished(done=True, retried=True, follow_up=False)]
        assert queue.job_ids == ([job.id, other.id] if front else [other.id, job.id])
        job.refresh()
        assert (status(job), job.retries_left, job.results()) == ("queued", left, [])
        assert registries(connection, QUEUE, job.id) == set()
    connection.lrem(queue.key, 0, other.id)
    claimed = claim(scripts)
    for _ in range(2):
        assert scripts.finish([failure(claimed)]) == [Finished(done=True, retried=False, follow_up=False)]
    assert (status(job), len(job.results())) == ("failed", 1)
    assert connection.hget(keys.worker("w"), "failed_job_count") == b"3"


def test_a_retry_with_intervals(connection: redis.Redis, queue: Queue) -> None:
    """rq's arithmetic of intervals; then the worker's sweep plays rq's scheduler."""
    scripts = Scripts(connection)
    job = enqueue(queue, retry=Retry(max=3, interval=[10, 20]))
    registry = ScheduledJobRegistry(queue=queue)
    for interval in (10, 10, 20):
        before = time.time()
        assert scripts.finish([failure(claim(scripts))])[0].retried
        assert status(job) == "scheduled"
        at = connection.zscore(registry.key, job.id)
        assert at is not None
        assert int(before) + interval <= at <= time.time() + interval
        scripts.sweep(QUEUE, time.time(), 600)
        assert status(job) == "scheduled", "too early"
        connection.zincrby(registry.key, -interval, job.id)
        scripts.sweep(QUEUE, time.time(), 600)
        assert (status(job), queue.job_ids) == ("queued", [job.id])
        assert connection.zcard(registry.key) == 0


def test_a_job_that_kills_the_engine_is_tried_again(valkey: EmbeddedServer, queue: Queue, tmp_path: Path) -> None:
    """And fails for good after that; one that can only fail again is not."""
    poison = queue.enqueue(FUNCTION, kwargs={"token_ids": [*POISON]}, retry=Retry(max=1))
    refused = enqueue(queue, "x" * 1000, retry=Retry(max=1))
    burst(valkey, tmp_path)
    assert (error_of(poison), error_of(refused)) == ("engine_crashed", "context_length_exceeded")
    for job, left in ((poison, 0), (refused, 1)):
        job.refresh()
        assert (status(job), job.retries_left, len(job.results())) == ("failed", left, 1)


def test_deadlines_and_timeouts(valkey: EmbeddedServer, connection: redis.Redis, queue: Queue, tmp_path: Path) -> None:
    """Over before the claim, while running, while waiting for the engine; or not at all. Never with output."""
    now = int(time.time() * 1000)
    long = {"max_tokens": 9000}
    past = enqueue(queue, deadline=now - 1)
    running = enqueue(queue, deadline=now + 2500, **long)
    timed = enqueue(queue, job_timeout=2, **long)
    waiting = enqueue(queue, job_timeout=2, **long)
    free = enqueue(queue, job_timeout=-1, deadline=now + 10**9)
    engine = {"step_seconds": 0.005, "max_num_seqs": 2, "num_blocks": 40_000, "max_model_len": 40_000}
    burst(valkey, tmp_path, **engine)
    assert [error_of(job) for job in (past, running)] == ["deadline_exceeded"] * 2
    assert [error_of(job) for job in (timed, waiting)] == ["job_timeout"] * 2
    for job in (past, running, timed, waiting):
        assert result_of(job).choices == []
        assert registries(connection, QUEUE, job.id) == {"failed"}
    assert status(free) == "finished"
    assert result_of(running).timings.first_token is not None
    assert result_of(past).timings.first_token is None
    assert forever(connection) == set()


def test_a_failed_job_that_is_requeued_begins_anew(
    valkey: EmbeddedServer, connection: redis.Redis, queue: Queue, tmp_path: Path
) -> None:
    job = enqueue(queue, deadline=int(time.time() * 1000) - 1, failure_ttl=300)
    burst(valkey, tmp_path)
    assert error_of(job) == "deadline_exceeded"
    job.kwargs = {"prompt": "x", "sampling": {"temperature": 0, "ignore_eos": True, "max_tokens": 5}}
    job.save()
    job.requeue()
    burst(valkey, tmp_path)
    assert status(job) == "finished"
    expected = alone(list(b"x"), SamplingParams(temperature=0, ignore_eos=True, max_tokens=5))
    assert result_of(job).choices[0].token_ids == expected
    assert result_of(job).resumes == 0
    assert len(job.results()) == 2
    assert registries(connection, QUEUE, job.id) == {"finished"}
    assert forever(connection) == set()


# ── what follows ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_dependents(valkey: EmbeddedServer, connection: redis.Redis, queue: Queue, tmp_path: Path) -> None:
    good, bad = enqueue(queue), enqueue(queue, "x" * 1000)
    after_good = [enqueue(queue, depends_on=good) for _ in range(3)]
    after_both = enqueue(queue, depends_on=[good, after_good[0]])
    after_bad = enqueue(queue, depends_on=bad)
    in_spite_of_bad = enqueue(queue, depends_on=Dependency(jobs=[bad], allow_failure=True))
    burst(valkey, tmp_path)
    assert [status(job) for job in (*after_good, after_both, in_spite_of_bad)] == ["finished"] * 5
    assert status(after_bad) == "deferred"
    after_bad.delete()
    assert forever(connection) == set()


def test_what_a_dead_worker_left_to_be_done_is_done(
    valkey: EmbeddedServer, connection: redis.Redis, queue: Queue, tmp_path: Path
) -> None:
    """It ended a job and died before it queued the dependent. The next worker finds the note, and obeys it."""
    scripts = Scripts(connection)
    first = enqueue(queue)
    dependent = enqueue(queue, depends_on=first)
    claimed = claim(scripts, "dead")
    end = Ending(claimed.ownership, QUEUE, "dead", "finished", {"type": 1}, time.time(), 1.0, 600)
    assert scripts.finish([end]) == [Finished(done=True, retried=False, follow_up=True)]
    assert connection.hgetall(keys.followups(QUEUE)) == {first.id.encode(): b"dead"}
    with worker(valkey.url, "w", log=tmp_path / "log"):
        eventually(lambda: status(dependent) == "finished", "the dependent has run")
        eventually(lambda: not connection.exists(keys.followups(QUEUE)), "the note is struck out")


@contextmanager
def listening() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A web server: its address, and what was posted to it."""
    posted: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{web.server_port}/", posted
        web.shutdown()
        thread.join()


@pytest.mark.parametrize("allowed", [False, True])
def test_callbacks_and_webhooks(
    allowed: bool, valkey: EmbeddedServer, connection: redis.Redis, queue: Queue, tmp_path: Path
) -> None:
    """Functions are run only where the operator allows it; webhooks, being data, are always sent."""
    with listening() as (url, posted):
        options: dict[str, Any] = {
            "on_success": Callback(callbacks.on_success),
            "on_failure": Callback(callbacks.on_failure),
            "webhooks": [Webhook(url, end, method="POST") for end in ("finished", "failed")],  # type: ignore[arg-type]
        }
        good, bad = enqueue(queue, **options), enqueue(queue, "x" * 1000, **options)
        broken = enqueue(queue, on_success=Callback(callbacks.broken))
        deaf = enqueue(queue, webhooks=[Webhook("http://127.0.0.1:9/", "finished", method="POST")])
        log = burst(valkey, tmp_path, *(["--allow-callbacks"] if allowed else []))
    assert [(entry["job_id"], entry["status"]) for entry in posted] == [(bad.id, "failed"), (good.id, "finished")]
    assert posted[0]["exc_info"].startswith("context_length_exceeded: ")
    called = {entry.decode() for entry in connection.lrange(callbacks.CALLED, 0, -1)}
    if allowed:
        assert called == {f"success {good.id} 1", f"failure {bad.id} JobFailed context_length_exceeded"}
        assert "a callback of the user's" in log
    else:
        assert called == set()
        assert "that needs --allow-callbacks" in log
    assert [status(job) for job in (good, bad, broken, deaf)] == ["finished", "failed", "finished", "finished"]
    assert forever(connection) <= {callbacks.CALLED}


def test_a_rate_limit_lets_the_next_one_in(valkey: EmbeddedServer, queue: Queue, tmp_path: Path) -> None:
    limited = [enqueue(queue, rate_limit=RateLimit("k", 1)) for _ in range(4)]
    assert [status(job) for job in limited] == ["queued", *["rate_limited"] * 3]
    burst(valkey, tmp_path)
    assert [status(job) for job in limited] == ["finished"] * 4


# ── what stays, and in which order ──────────────────────────────────────────────────────────────────────────────────


def test_times_to_live(valkey: EmbeddedServer, connection: redis.Redis, queue: Queue, tmp_path: Path) -> None:
    """0 is at once and -1 for ever, as in rq, for every key of a job."""
    ends = {}
    for ttl in (0, -1, 300):
        ends["finished", ttl] = enqueue(queue, result_ttl=ttl)
        ends["failed", ttl] = enqueue(queue, "x" * 1000, failure_ttl=ttl)
        ends["deadline", ttl] = enqueue(queue, max_tokens=2, failure_ttl=ttl, deadline=1)
    burst(valkey, tmp_path)
    for (kind, ttl), job in ends.items():
        registry = "finished" if kind == "finished" else "failed"
        assert registries(connection, QUEUE, job.id) == (set() if ttl == 0 else {registry})
        left = [key for key in connection.scan_iter() if job.id.encode() in key]
        assert bool(left) == (ttl != 0)
        for key in left:
            assert connection.ttl(key) == -1 if ttl == -1 else 0 < connection.ttl(key) <= ttl
    Queue(QUEUE, connection=connection).finished_job_registry.cleanup(timestamp=time.time() + 10**9)
    assert registries(connection, QUEUE, ends["finished", -1].id) == {"finished"}
    assert registries(connection, QUEUE, ends["finished", 300].id) == set()


def test_queues_in_strict_order(valkey: EmbeddedServer, connection: redis.Redis, tmp_path: Path) -> None:
    """A later queue's jobs wait for those of an earlier one; a job for another model is refused whatever its queue."""
    first, second = (Queue(name, connection=connection, serializer=serializer) for name in ("first", "second"))
    later = [enqueue(second, f"{i}") for i in range(10)]
    sooner = [enqueue(first, f"{i}") for i in range(10)]
    named, other = enqueue(second, model=QUEUE), enqueue(first, model="other")
    burst(valkey, tmp_path, "--queue", "first", "--queue", "second", max_num_seqs=4)
    assert error_of(other) == "model_not_found"

    def claimed(job: Job) -> float:
        return result_of(job).timings.claimed or 0.0

    assert max(map(claimed, sooner)) <= min(map(claimed, [*later, named]))
    assert registries(connection, "second", named.id) == {"finished"}
    with worker(valkey.url, "v", "--queue", "first", "--queue", "second", log=tmp_path / "log"):
        eventually(lambda: connection.scard(keys.workers_of_queue("second")), "the worker is registered")
        for each in (first, second, first):
            job = enqueue(each)
            eventually(lambda job=job: status(job) == "finished", "either queue wakes it")  # type: ignore[misc]


def test_the_more_urgent_of_those_that_wait_goes_first(valkey: EmbeddedServer, queue: Queue, tmp_path: Path) -> None:
    jobs = {name: enqueue(queue, name, max_tokens=60, priority=p) for name, p in (("a", 1), ("b", 1), ("c", -3))}
    burst(valkey, tmp_path, max_num_seqs=1, max_model_len=100, step_seconds=0.002)
    done = {name: result_of(job).timings.finished or 0.0 for name, job in jobs.items()}
    assert done["c"] < done["b"]


def test_what_is_not_carried_out_is_refused(valkey: EmbeddedServer, queue: Queue, tmp_path: Path) -> None:
    repeating = enqueue(queue, repeat=Repeat(times=2))
    burst(valkey, tmp_path)
    assert error_of(repeating) == "unsupported_parameter"
