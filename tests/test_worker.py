"""Real workers on a real server: stock rq jobs in, results out, whoever dies or is stopped in between.

Outputs are compared with what the null model gives to each prompt by definition.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis
from rq import Queue, Worker
from rq.job import Job
from rq.registry import StartedJobRegistry
from rq.suspension import resume, suspend

from batonq.engine.sampling_params import SamplingParams
from batonq.producer import keys, serializer
from batonq.producer.embedded import EmbeddedServer
from batonq.producer.schema import FUNCTION
from tests.support import null_engine
from tests.support.definition import alone
from tests.support.servers import eventually
from tests.support.workers import QUEUE, result_of, worker


def enqueue(queue: Queue, prompt: str, **sampling: object) -> Job:
    return queue.enqueue(FUNCTION, prompt=prompt, sampling={"temperature": 0, **sampling})


def definition(prompt: str, **sampling: object) -> list[int]:
    return alone(list(prompt.encode()), SamplingParams.model_validate({"temperature": 0, **sampling}))


def ended(jobs: list[Job]) -> bool:
    return all(job.get_status() in ("finished", "failed") for job in jobs)


LONG = {"max_tokens": 100, "ignore_eos": True}
#: Slow enough that jobs of 100 tokens are met while they run.
SLOW = {"step_seconds": 0.01, "max_num_batched_tokens": 64, "num_blocks": 400}


def test_a_stock_job_is_answered(valkey: EmbeddedServer, queue: Queue, tmp_path: Path) -> None:
    jobs = [enqueue(queue, f"prompt {i}", max_tokens=20, seed=i, temperature=i % 2) for i in range(40)]
    with worker(valkey.url, "w", "--burst", log=tmp_path / "log") as running:
        assert running.wait() == 0
    for i, job in enumerate(jobs):
        result = result_of(job)
        assert job.get_status() == "finished"
        assert result.choices[0].token_ids == definition(f"prompt {i}", max_tokens=20, seed=i, temperature=i % 2)
        assert result.seed == i
        assert result.usage is not None
        assert result.usage.prompt_tokens == len(f"prompt {i}")
        assert result.owners == ["w"]
        job.refresh()
        assert "prompt" not in (job.description or ""), "the prompt is in plain sight"


def test_rq_info_counts_what_one_worker_runs(
    valkey: EmbeddedServer, connection: redis.Redis, queue: Queue, tmp_path: Path
) -> None:
    jobs = [enqueue(queue, f"{i}", max_tokens=1500, ignore_eos=True) for i in range(60)]
    engine = {**SLOW, "max_num_seqs": 40, "num_blocks": 20_000, "max_model_len": 2000}
    with worker(valkey.url, "w", log=tmp_path / "log", **engine) as running:
        registry = StartedJobRegistry(QUEUE, connection=connection)
        eventually(lambda: registry.get_job_count(cleanup=False) == 50, "50 jobs run")
        eventually(
            lambda: [connection.hget(keys.context(job.id), "state") for job in jobs].count(b"RUNNING") == 40,
            "40 contexts are mirrored as running",
        )
        info = subprocess.run(
            [sys.executable, "-m", "rq.cli", "info", "--url", valkey.url, "--raw"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert f"queue {QUEUE} 10, 50 executing, 0 finished, 0 failed" in info
        assert registry.get_job_count(cleanup=True) == 50, "rq's own cleanup took running jobs away"
        (seen,) = Worker.all(connection=connection, serializer=serializer)
        assert seen.name == "w"
        assert seen.get_state() == "busy"
        assert seen.current_execution_count == 50
        assert len(seen.get_current_executions()) == 50
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 0
    assert registry.get_job_count(cleanup=False) == 0
    assert queue.job_ids == [job.id for job in jobs], "released jobs are in front, in their order"
    assert not Worker.all(connection=connection)


def test_a_job_that_cannot_run_fails_alone(
    valkey: EmbeddedServer, connection: redis.Redis, queue: Queue, tmp_path: Path
) -> None:
    bad = {
        "unknown_function": queue.enqueue("os.system", "true"),
        "invalid_parameter": enqueue(queue, "x", top_p=3),
        "unsupported_parameter": enqueue(queue, "x", guided_regex="a"),
        "context_length_exceeded": enqueue(queue, "x" * 1000),
        "model_not_found": queue.enqueue(FUNCTION, prompt="x", model="other"),
        "unreadable_job": Queue(QUEUE, connection=connection).enqueue(FUNCTION, prompt="pickled"),
        "invalid_token_ids": queue.enqueue(FUNCTION, token_ids=[1, 999]),
    }
    good = [enqueue(queue, f"good {i}", max_tokens=5) for i in range(10)]
    with worker(valkey.url, "w", "--burst", log=tmp_path / "log") as running:
        assert running.wait() == 0
    for code, job in bad.items():
        stored = Job.fetch(job.id, connection=connection, serializer=serializer)
        result = result_of(stored)
        assert stored.get_status() == "failed"
        assert result.error is not None
        assert result.error.code == code
        latest = stored.latest_result()
        assert latest is not None
        assert (latest.exc_string or "").startswith(f"{code}: ")
        assert stored.id in queue.failed_job_registry.get_job_ids(cleanup=False)
    assert [result_of(job).choices[0].token_ids for job in good] == [
        definition(f"good {i}", max_tokens=5) for i in range(10)
    ]


def test_sigterm_hands_contexts_to_the_next_worker(
    valkey: EmbeddedServer, connection: redis.Redis, queue: Queue, tmp_path: Path
) -> None:
    jobs = [enqueue(queue, f"{i}", **LONG) for i in range(12)]
    with worker(valkey.url, "first", log=tmp_path / "log", **SLOW) as first:
        eventually(lambda: connection.strlen(keys.tokens(jobs[0].id)) >= 40, "ten tokens are committed")
        first.process.send_signal(signal.SIGTERM)
        assert first.wait() == 0
    committed = {job.id: connection.strlen(keys.tokens(job.id)) // 4 for job in jobs}
    assert all(job.get_status() == "queued" for job in jobs)
    assert sum(count >= 10 for count in committed.values()) >= 1
    with worker(valkey.url, "second", "--burst", log=tmp_path / "log", **SLOW) as second:
        assert second.wait() == 0
    for i, job in enumerate(jobs):
        result = result_of(job)
        assert result.choices[0].token_ids == definition(f"{i}", **LONG)
        resumed = committed[job.id] > 0
        assert result.owners == (["first", "second"] if resumed or result.resumes else ["second"])
    assert sum(result_of(job).resumes for job in jobs) >= 1


@pytest.mark.parametrize("victim", ["child", "parent", "both"])
def test_sigkill_loses_nothing(
    victim: str, valkey: EmbeddedServer, connection: redis.Redis, queue: Queue, tmp_path: Path
) -> None:
    jobs = [enqueue(queue, f"{i}", **LONG) for i in range(12)]
    with worker(valkey.url, "first", log=tmp_path / "log", **SLOW) as first:
        eventually(lambda: connection.strlen(keys.tokens(jobs[0].id)) >= 40, "ten tokens are committed")
        child = first.child()
        if victim in ("parent", "both"):
            first.process.kill()
        if victim in ("child", "both"):
            child.kill()
        _, alive = psutil.wait_procs([child], 10)
        assert not alive, "the child outlived its parent"
        if victim != "child":
            first.wait()
            with worker(valkey.url, "second", "--burst", log=tmp_path / "log", **SLOW) as second:
                assert second.wait() == 0
        eventually(lambda: ended(jobs), "all jobs have ended")
        for i, job in enumerate(jobs):
            result = result_of(job)
            assert result.choices[0].token_ids == definition(f"{i}", **LONG)
            assert len(job.results()) == 1, "published twice"
        assert result_of(jobs[0]).resumes == 1
    assert connection.keys(f"{keys.PREFIX}:batonq:tok:*") == []
    assert StartedJobRegistry(QUEUE, connection=connection).get_job_count(cleanup=False) == 0


def test_a_job_that_kills_the_engine_fails_and_its_neighbours_finish(
    valkey: EmbeddedServer, connection: redis.Redis, queue: Queue, tmp_path: Path
) -> None:
    before = [enqueue(queue, f"a{i}", max_tokens=30, ignore_eos=True) for i in range(3)]
    poison = queue.enqueue(FUNCTION, token_ids=[*null_engine.POISON])
    after = [enqueue(queue, f"b{i}", max_tokens=30, ignore_eos=True) for i in range(3)]
    with worker(valkey.url, "w", "--burst", log=tmp_path / "log") as running:
        assert running.wait() == 0
    failed = result_of(poison)
    assert failed.error is not None
    assert failed.error.code == "engine_crashed"
    assert poison.get_status() == "failed"
    for prefix, jobs in (("a", before), ("b", after)):
        for i, job in enumerate(jobs):
            expected = definition(f"{prefix}{i}", max_tokens=30, ignore_eos=True)
            assert result_of(job).choices[0].token_ids == expected


def test_the_server_dies_and_comes_back(valkey: EmbeddedServer, tmp_path: Path) -> None:
    with redis.Redis.from_url(valkey.url) as connection:
        queue = Queue(QUEUE, connection=connection, serializer=serializer)
        jobs = [enqueue(queue, f"{i}", **LONG) for i in range(12)]
        with worker(valkey.url, "w", log=tmp_path / "log", **SLOW) as running:
            eventually(lambda: connection.strlen(keys.tokens(jobs[0].id)) >= 40, "ten tokens are committed")
            valkey.kill()
            again = EmbeddedServer(valkey.directory)
            try:
                eventually(lambda: ended(jobs), "all jobs have ended")
                for i, job in enumerate(jobs):
                    assert result_of(job).choices[0].token_ids == definition(f"{i}", **LONG)
                    assert len(job.results()) == 1
                running.process.send_signal(signal.SIGTERM)
                assert running.wait() == 0
            finally:
                again.stop()


def test_a_suspended_worker_claims_nothing(
    valkey: EmbeddedServer, connection: redis.Redis, queue: Queue, tmp_path: Path
) -> None:
    suspend(connection)
    with worker(valkey.url, "w", log=tmp_path / "log") as running:
        eventually(lambda: connection.scard(keys.workers_of_queue(QUEUE)), "the worker is registered")
        job = enqueue(queue, "x", max_tokens=3)
        running.process.send_signal(signal.SIGSTOP)
        running.process.send_signal(signal.SIGCONT)
        assert job.get_status() == "queued"
        resume(connection)
        eventually(lambda: ended([job]), "the job is answered")


def test_an_idle_worker_wakes_for_each_job(
    valkey: EmbeddedServer, connection: redis.Redis, queue: Queue, tmp_path: Path
) -> None:
    with worker(valkey.url, "w", log=tmp_path / "log"):
        eventually(lambda: connection.scard(keys.workers_of_queue(QUEUE)), "the worker is registered")
        for i in range(20):
            job = enqueue(queue, f"{i}", max_tokens=3)
            eventually(lambda job=job: ended([job]), "the job is answered")  # type: ignore[misc]
            assert result_of(job).choices[0].token_ids == definition(f"{i}", max_tokens=3)


def test_ids_that_are_twice_gone_or_cancelled_are_dropped(
    valkey: EmbeddedServer, connection: redis.Redis, queue: Queue, tmp_path: Path
) -> None:
    twice, gone, cancelled = (enqueue(queue, name, max_tokens=3) for name in ("twice", "gone", "cancelled"))
    connection.rpush(queue.key, twice.id, "never-existed")
    connection.delete(gone.key)
    cancelled.cancel()
    connection.rpush(queue.key, cancelled.id)
    with worker(valkey.url, "w", "--burst", log=tmp_path / "log") as running:
        assert running.wait() == 0
    assert len(twice.results()) == 1
    assert cancelled.get_status() == "canceled"
    assert cancelled.results() == []
    assert connection.llen(queue.key) == 0


def test_without_a_model_or_a_server_it_says_so(valkey: EmbeddedServer, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "batonq.worker", *arguments], capture_output=True, text=True, check=False, timeout=60
        )

    missing = run("--model", str(tmp_path / "nowhere" / "at-all"), "--redis-url", valkey.url)
    assert missing.returncode == 1
    assert "nowhere/at-all" in missing.stderr
    assert "Traceback" not in missing.stderr
    unreachable = run("--model", "null", "--redis-url", f"unix://{tmp_path}/no.sock")
    assert unreachable.returncode == 1
    assert "no.sock" in unreachable.stderr
    assert "Traceback" not in unreachable.stderr


def test_a_stock_rq_worker_is_told_what_to_start(valkey: EmbeddedServer, queue: Queue, connection: redis.Redis) -> None:
    job = enqueue(queue, "x")
    stock = ["--serializer", "batonq.producer.serializer"]
    subprocess.run(
        [sys.executable, "-m", "rq.cli", "worker", QUEUE, "--burst", "--url", valkey.url, *stock],
        check=True,
        capture_output=True,
    )
    latest = job.latest_result()
    assert job.get_status() == "failed"
    assert latest is not None
    assert "batonq worker" in (latest.exc_string or "")


def test_a_stopping_worker_waits_for_a_lost_server_only_so_long(valkey: EmbeddedServer, tmp_path: Path) -> None:
    """With a second request it goes at once; whoever buries it queues what it held."""
    with redis.Redis.from_url(valkey.url) as connection:
        queue = Queue(QUEUE, connection=connection, serializer=serializer)
        jobs = [enqueue(queue, f"{i}", **LONG) for i in range(4)]
        with worker(valkey.url, "first", log=tmp_path / "log", **SLOW) as first:
            eventually(lambda: connection.strlen(keys.tokens(jobs[0].id)) >= 40, "ten tokens are committed")
            valkey.kill()
            first.process.send_signal(signal.SIGTERM)
            eventually(lambda: "trying again" in first.log.read_text(), "it waits for the server")
            first.process.send_signal(signal.SIGTERM)
            assert first.wait() == 0
        assert "stopped before the server could be told everything" in (tmp_path / "log").read_text()
        again = EmbeddedServer(valkey.directory)
        try:
            with worker(valkey.url, "second", "--burst", log=tmp_path / "log", **SLOW) as second:
                assert second.wait() == 0
            for i, job in enumerate(jobs):
                assert result_of(job).choices[0].token_ids == definition(f"{i}", **LONG)
        finally:
            again.stop()
