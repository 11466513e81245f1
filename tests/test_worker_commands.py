"""rq's commands and cancelling: each acts on one job, at once, wherever the job is, and leaves its neighbours alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import redis
from rq import Queue
from rq.command import (
    send_command,
    send_kill_horse_command,
    send_shutdown_command,
    send_stop_execution_command,
    send_stop_job_command,
)
from rq.job import Job

from batonq.engine.sampling_params import SamplingParams
from batonq.producer import Producer, keys, serializer
from batonq.producer.embedded import EmbeddedServer
from batonq.producer.errors import JobNotFoundError
from batonq.worker.commands import Command, parse
from tests.support.definition import alone
from tests.support.redis_keys import forever, registries
from tests.support.servers import eventually
from tests.support.workers import QUEUE, worker

#: Jobs of thousands of tokens, so that they run until somebody ends them.
ENDLESS = {"step_seconds": 0.005, "max_num_batched_tokens": 64, "num_blocks": 40_000, "max_model_len": 40_000}


def endless(producer: Producer, prompt: str) -> str:
    return producer.submit(prompt=prompt, temperature=0, ignore_eos=True, max_tokens=9000)


def short(producer: Producer, prompt: str) -> str:
    return producer.submit(prompt=prompt, temperature=0, ignore_eos=True, max_tokens=5)


def definition(prompt: str, length: int) -> list[int]:
    return alone(list(prompt.encode()), SamplingParams(temperature=0, ignore_eos=True, max_tokens=length))


def committed(connection: redis.Redis, job_id: str) -> int:
    return connection.strlen(keys.tokens(job_id)) // 4


def fetch(producer: Producer, job_id: str) -> Job:
    return Job.fetch(job_id, connection=producer.connection, serializer=serializer)


def test_stop_job_stops_any_job_that_a_worker_holds(valkey: EmbeddedServer, producer: Producer, tmp_path: Path) -> None:
    """The second of those that run, and one that waits in the engine behind them."""
    connection = producer.connection
    jobs = [endless(producer, f"{i}") for i in range(4)]
    with worker(valkey.url, "w", log=tmp_path / "log", **ENDLESS, max_num_seqs=2):
        eventually(lambda: committed(connection, jobs[1]) > 5, "two run")
        eventually(lambda: connection.zcard(keys.started(QUEUE)) == 4, "two wait in the worker")
        for job_id in (jobs[1], jobs[3]):
            send_stop_job_command(connection, job_id, serializer=serializer)
            eventually(lambda job_id=job_id: fetch(producer, job_id).get_status() == "stopped", "it is stopped")  # type: ignore[misc]
            result = producer.result(job_id)
            assert result.error is not None
            assert result.error.code == "job_stopped"
            assert result.choices == []
            assert registries(connection, QUEUE, job_id) == {"failed"}
        assert connection.scard(keys.worker_executions("w")) == 2
        eventually(lambda: committed(connection, jobs[2]) > 5, "a place became free")
        before = committed(connection, jobs[0])
        eventually(lambda: committed(connection, jobs[0]) > before, "the other one runs on")
        assert [fetch(producer, jobs[i]).get_status() for i in (0, 2)] == ["started", "started"]


def test_stop_execution_stops_that_execution_only(valkey: EmbeddedServer, producer: Producer, tmp_path: Path) -> None:
    """Another one's id, and what is no command, is told in the log and stops nothing."""
    connection = producer.connection
    job_id = endless(producer, "x")
    with worker(valkey.url, "w", log=tmp_path / "log", **ENDLESS) as running:
        eventually(lambda: committed(connection, job_id) > 5, "it runs")
        (execution,) = fetch(producer, job_id).get_executions()
        send_command(connection, "w", "stop-execution", job_id=job_id, execution_id="another")
        send_command(connection, "w", "no-such-command")
        connection.publish(keys.pubsub("w"), b"\xff no json")
        for told in (f"{job_id}: does not run here", "no-such-command is not known here", "can't be read"):
            eventually(lambda told=told: told in running.log.read_text(), "the worker has heard it")  # type: ignore[misc]
        before = committed(connection, job_id)
        eventually(lambda: committed(connection, job_id) > before + 20, "it runs on")
        assert fetch(producer, job_id).get_status() == "started"
        assert [each.id for each in fetch(producer, job_id).get_executions()] == [execution.id]
        send_stop_execution_command(connection, job_id, execution.id)
        eventually(lambda: fetch(producer, job_id).get_status() == "stopped", "it is stopped")
        error = producer.result(job_id).error
        assert error is not None
        assert error.code == "job_stopped"
        assert registries(connection, QUEUE, job_id) == {"failed"}
        assert connection.scard(keys.worker_executions("w")) == 0


def test_shutdown_hands_the_jobs_back(valkey: EmbeddedServer, producer: Producer, tmp_path: Path) -> None:
    jobs = [endless(producer, f"{i}") for i in range(3)]
    with worker(valkey.url, "w", log=tmp_path / "log", **ENDLESS) as running:
        eventually(lambda: committed(producer.connection, jobs[2]) > 5, "they run")
        send_shutdown_command(producer.connection, "w")
        assert running.wait() == 0
    assert producer.connection.lrange(keys.queue(QUEUE), 0, -1) == [job_id.encode() for job_id in jobs]


def test_kill_horse_kills_the_engine_and_no_job(valkey: EmbeddedServer, producer: Producer, tmp_path: Path) -> None:
    jobs = [producer.submit(prompt=f"{i}", temperature=0, ignore_eos=True, max_tokens=200) for i in range(3)]
    with worker(valkey.url, "w", log=tmp_path / "log", **ENDLESS) as running:
        eventually(lambda: committed(producer.connection, jobs[2]) > 5, "they run")
        child = running.child()
        send_kill_horse_command(producer.connection, "w")
        results = [producer.result(job_id, timeout=60) for job_id in jobs]
        assert not child.is_running()
    assert [result.choices[0].token_ids for result in results] == [definition(f"{i}", 200) for i in range(3)]
    assert [result.resumes for result in results] == [1, 1, 1]


def test_the_worker_takes_no_core_from_its_engine(valkey: EmbeddedServer, producer: Producer, tmp_path: Path) -> None:
    """Neither from the first nor from another in its place, all of whose threads are scheduled as ever."""
    with worker(valkey.url, "w", log=tmp_path / "log", **ENDLESS) as running:
        for _ in range(2):
            job_id = producer.submit(prompt="x", temperature=0, ignore_eos=True, max_tokens=2)
            assert producer.result(job_id, timeout=60).error is None
            engine = running.child()
            assert os.sched_getscheduler(running.process.pid) == os.SCHED_BATCH
            assert {os.sched_getscheduler(thread.id) for thread in engine.threads()} == {os.SCHED_OTHER}
            engine.kill()
            engine.wait()


def test_commands_as_rq_publishes_them() -> None:
    assert parse(b'{"command": "stop-job", "job_id": "a"}') == Command("stop-job", "a")
    assert parse('{"command": "shutdown"}') == Command("shutdown")
    for junk in (b"", b"[]", b"{}", b'{"command": 3}', b"\xff", None, 1):
        assert parse(junk) is None


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "rq's"])
def test_canceling(stock: bool, valkey: EmbeddedServer, producer: Producer, tmp_path: Path) -> None:
    """Queued, running, and waiting in the engine: the same end, whoever cancels; the place goes to the next one."""
    connection = producer.connection
    running_one, waiting, queued = endless(producer, "a"), endless(producer, "b"), None
    behind = short(producer, "behind")
    queued = short(producer, "queued")

    def cancel(job_id: str) -> None:
        if stock:
            fetch(producer, job_id).cancel()
        else:
            assert producer.cancel(job_id)

    with worker(valkey.url, "w", log=tmp_path / "log", **ENDLESS, max_num_seqs=1):
        eventually(lambda: committed(connection, running_one) > 5, "the first runs")
        eventually(lambda: fetch(producer, behind).get_status() == "started", "two wait in the worker")
        assert fetch(producer, queued).get_status() == "queued"
        cancel(queued)
        cancel(waiting)
        assert connection.hget(keys.context(running_one), "state") == b"RUNNING"
        cancel(running_one)
        if not stock:
            assert committed(connection, running_one) == 0, "its tokens are there after it was canceled"
        assert producer.result(behind, timeout=60).choices[0].token_ids == definition("behind", 5)
        for job_id in (running_one, waiting):
            eventually(lambda job_id=job_id: connection.ttl(keys.job(job_id)) > 0, "it has a time to live")  # type: ignore[misc]
            assert connection.exists(keys.tokens(job_id)) == 0
            assert connection.ttl(keys.context(job_id)) > 0
            assert connection.keys(keys.execution(job_id, "*")) == []
        eventually(lambda: connection.scard(keys.worker_executions("w")) == 0, "the worker holds nothing")
        for job_id in (running_one, waiting, queued):
            assert fetch(producer, job_id).get_status() == "canceled"
            assert registries(connection, QUEUE, job_id) == {"canceled"}
            error = producer.result(job_id).error
            assert error is not None
            assert error.code == "job_canceled"
    if not stock:
        assert not producer.cancel(queued), "it had ended"
        assert not producer.cancel(behind)
        assert producer.result(behind).choices
        assert forever(connection) == set()


def test_nothing_is_published_after_cancel_has_returned(
    valkey: EmbeddedServer, producer: Producer, tmp_path: Path
) -> None:
    connection = producer.connection
    jobs = [
        producer.submit(prompt=f"{i}", stream=True, ignore_eos=True, max_tokens=9000, client_id="me") for i in range(6)
    ]
    with worker(valkey.url, "w", log=tmp_path / "log", **ENDLESS) as running:
        for job_id in jobs:
            eventually(lambda job_id=job_id: connection.xlen(keys.stream(job_id)) > 2, "it streams")  # type: ignore[misc]
        after = {}
        for job_id in jobs:
            assert producer.cancel(job_id)
            after[job_id] = connection.xrange(keys.stream(job_id))
        eventually(lambda: connection.hget(keys.worker("w"), "state") == b"idle", "the worker has dropped them all")
        send_shutdown_command(connection, "w")
        assert running.wait() == 0
    for job_id in jobs:
        assert connection.xrange(keys.stream(job_id)) == after[job_id]
        assert connection.xlen(keys.results(job_id)) == 0
        assert after[job_id][-1][1][b"error"] == b"job_canceled"
    assert connection.lrange(keys.done("me"), 0, -1) == [job_id.encode() for job_id in jobs]
    assert forever(connection) == set()


def test_cancelling_what_nobody_runs(producer: Producer) -> None:
    """Scheduled and deferred jobs, one whose owner is gone, one that is not ours, one that never was."""
    connection = producer.connection
    queue = Queue(QUEUE, connection=connection, serializer=serializer)
    first = queue.enqueue("batonq.worker.tasks.generate", prompt="x")
    deferred = queue.enqueue("batonq.worker.tasks.generate", prompt="x", depends_on=first)
    assert producer.cancel(deferred.id)
    assert connection.zcard(f"{keys.PREFIX}:deferred:{QUEUE}") == 0
    strange = Queue(QUEUE, connection=connection).enqueue("os.getpid")
    assert producer.cancel(strange.id)
    assert registries(connection, QUEUE, strange.id) == {"canceled"}
    with pytest.raises(JobNotFoundError):
        producer.cancel("unknown")
