"""The whole face that the worker shows to rq, at once: five hundred jobs over two queues that come to every kind of
end. rq's own code reads the state, and rq's own cleanup runs all the time."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from rq import Queue, Retry
from rq.command import send_stop_job_command
from rq.job import Job
from rq.registry import StartedJobRegistry, clean_registries
from rq.suspension import resume, suspend

from batonq.engine.sampling_params import SamplingParams
from batonq.producer import Producer, keys, serializer
from batonq.producer.client import make_job
from batonq.producer.embedded import EmbeddedServer
from batonq.producer.schema import FUNCTION
from batonq.worker.scripts import Scripts
from tests.support.definition import alone
from tests.support.redis_keys import forever, registries
from tests.support.servers import eventually
from tests.support.workers import QUEUE, error_of, result_of, status, worker

FAR_FUTURE = 10**12


def enqueue(queue: Queue, prompt: str, *, max_tokens: int = 5, n: int = 1, **options: Any) -> Job:
    sampling = {"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens}
    return queue.enqueue(FUNCTION, kwargs={"prompt": prompt, "sampling": sampling, "n": n}, **options)


def definition(prompt: str, length: int = 5) -> list[int]:
    return alone(list(prompt.encode()), SamplingParams(temperature=0, ignore_eos=True, max_tokens=length))


def rq_info(valkey: EmbeddedServer) -> str:
    command = [sys.executable, "-m", "rq.cli", "info", "--url", valkey.url, "--raw"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def shown_state(valkey: EmbeddedServer) -> str:
    """The state of worker `w`, as `rq info` tells it."""
    line = re.search(r"^worker w \(.*\) (\w+) ", rq_info(valkey), re.M)
    assert line is not None
    return line[1]


def counts(valkey: EmbeddedServer, name: str) -> tuple[int, ...]:
    """Queued, executing, finished and failed jobs of a queue, as `rq info` tells them."""
    line = re.search(rf"^queue {name} (\d+), (\d+) executing, (\d+) finished, (\d+) failed", rq_info(valkey), re.M)
    assert line is not None
    return tuple(map(int, line.groups()))


@contextmanager
def rq_cleaning_up(url: str, *names: str) -> Iterator[None]:
    """rq's own cleanup of these queues, over and over in a thread, the started registry's as if ages had gone by."""
    done = threading.Event()

    def clean() -> None:
        with redis.Redis.from_url(url) as client:
            while not done.wait(0.02):
                for name in names:
                    each = Queue(name, connection=client, serializer=serializer)
                    clean_registries(each)
                    StartedJobRegistry(queue=each).cleanup(timestamp=FAR_FUTURE)

    thread = threading.Thread(target=clean)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class Crowd:
    """Jobs over the queues `high` and `low`: some that run for long and come to different ends, and many short ones."""

    LONG = 4000

    def __init__(self, url: str) -> None:
        self.connection = redis.Redis.from_url(url)
        self.producer = Producer(self.connection)
        self.high, self.low = (Queue(n, connection=self.connection, serializer=serializer) for n in ("high", "low"))
        endless = {"max_tokens": self.LONG, "job_timeout": -1}
        self.long = {
            name: enqueue(self.high, name, **endless)
            for name in ("stop", "cancel", "rq's cancel", "stays", "stays too")
        }
        self.short: dict[str, Job] = {}

    def enqueue_short(self, count: int) -> None:
        for i in range(count):
            each = self.high if i % 2 else self.low
            self.short[f"{i}"] = enqueue(each, f"{i}", failure_ttl=600, result_ttl=600)

    def special(self) -> dict[str, Job]:
        """One job each that a deadline ends before it begins, that is tried again, and that is too long to be."""
        late = make_job(prompt="late", model=QUEUE, deadline=1000, id="late")
        self.producer.enqueue([late], queue="low")
        return {
            "late": Job.fetch("late", connection=self.connection, serializer=serializer),
            "retry": enqueue(self.low, "retry", max_tokens=300, job_timeout=1, retry=Retry(max=50)),
            "refused": enqueue(self.low, "x" * 5000, retry=Retry(max=5)),
        }

    def statuses(self) -> dict[str, str]:
        return {name: status(job) for name, job in {**self.long, **self.short}.items()}


def test_five_hundred_jobs_over_two_queues(valkey: EmbeddedServer, connection: redis.Redis, tmp_path: Path) -> None:
    crowd = Crowd(valkey.url)
    engine = {"step_seconds": 0.005, "max_num_seqs": 32, "max_num_batched_tokens": 512, "num_blocks": 40_000}
    options = ["--queue", "high", "--queue", "low"]
    with (
        worker(valkey.url, "w", *options, log=tmp_path / "log", max_model_len=4500, **engine),
        rq_cleaning_up(valkey.url, "high", "low"),
    ):
        ids = {name: job.id for name, job in crowd.long.items()}
        for job_id in ids.values():
            eventually(lambda job_id=job_id: connection.strlen(keys.tokens(job_id)) > 40, "the long jobs run")  # type: ignore[misc]
        assert shown_state(valkey) == "busy"
        suspend(connection)
        eventually(lambda: shown_state(valkey) == "suspended", "rq info shows the suspension")
        crowd.enqueue_short(492)
        special = crowd.special()
        before = connection.strlen(keys.tokens(ids["stays"]))
        eventually(lambda: connection.strlen(keys.tokens(ids["stays"])) > before + 40, "what runs goes on")
        assert counts(valkey, "high") == (246, 5, 0, 0)
        assert counts(valkey, "low") == (249, 0, 0, 0)

        # Each of these changes one job's status and no other's.
        expected = crowd.statuses()
        for name, act in {
            "stop": lambda: send_stop_job_command(connection, ids["stop"], serializer=serializer),
            "cancel": lambda: crowd.producer.cancel(ids["cancel"]),
            "rq's cancel": crowd.long["rq's cancel"].cancel,
            "7": lambda: crowd.producer.cancel(crowd.short["7"].id),
            "8": crowd.short["8"].cancel,
        }.items():
            act()
            expected[name] = "stopped" if name == "stop" else "canceled"
            eventually(lambda: crowd.statuses() == expected, f"{name} changes one job")
        # An id that was canceled by us stays in its queue until it is claimed: that is what makes it O(1).
        assert counts(valkey, "high") == (246, 2, 0, 1)
        assert counts(valkey, "low") == (248, 0, 0, 0)

        resume(connection)
        crowd.long["stays"].refresh()
        eventually(lambda: status(special["retry"]) == "finished", "the retried job is done")
        eventually(
            lambda: all(s not in ("queued", "started") for n, s in crowd.statuses().items() if n in crowd.short), ""
        )
        assert crowd.statuses()["stays"] == "started"
        assert shown_state(valkey) == "busy"
        assert counts(valkey, "high") == (0, 2, 245, 1)
        assert counts(valkey, "low") == (0, 0, 246, 2)
        for name in ("stays", "stays too"):
            assert crowd.producer.cancel(ids[name])
        eventually(lambda: shown_state(valkey) == "idle", "nothing is left to do")
    check_ends(crowd, special)
    assert forever(connection) - {crowd.short["8"].key} == set()
    sweep_what_rq_canceled(connection, crowd.short["8"])
    assert forever(connection) == set()


def check_ends(crowd: Crowd, special: dict[str, Job]) -> None:
    """What became of each job, and that only one registry lists it."""
    for name, job in crowd.short.items():
        if name in ("7", "8"):
            assert job.results() == []
            assert registries(crowd.connection, job.origin, job.id) == {"canceled"}
        else:
            assert result_of(job).choices[0].token_ids == definition(name)
            assert registries(crowd.connection, job.origin, job.id) == {"finished"}
            assert len(job.results()) == 1
    assert [status(crowd.long[name]) for name in ("stop", "cancel", "rq's cancel")] == [
        "stopped",
        "canceled",
        "canceled",
    ]
    assert registries(crowd.connection, "high", crowd.long["stop"].id) == {"failed"}
    assert registries(crowd.connection, "high", crowd.long["rq's cancel"].id) == {"canceled"}
    assert (status(special["late"]), error_of(special["late"])) == ("failed", "deadline_exceeded")
    assert (status(special["refused"]), error_of(special["refused"])) == ("failed", "context_length_exceeded")
    special["refused"].refresh()
    assert special["refused"].retries_left == 5, "what can only fail again was tried again"
    special["retry"].refresh()
    assert special["retry"].retries_left is not None
    assert special["retry"].retries_left < 50
    assert result_of(special["retry"]).choices[0].token_ids == definition("retry", 300)
    assert result_of(special["retry"]).resumes == 50 - special["retry"].retries_left


def sweep_what_rq_canceled(connection: redis.Redis, job: Job) -> None:
    """rq gives a canceled job no time to live; the worker's sweep does, after a minute, which passes here."""
    registry = keys.canceled(job.origin)
    connection.zincrby(registry, -61, job.id)
    Scripts(connection).sweep(job.origin, time.time(), 600)
    assert 0 < connection.ttl(job.key) <= 600
    assert connection.zscore(registry, job.id) > time.time()
    connection.delete(job.key)
    connection.zadd(registry, {job.id: time.time() - 100})
    Scripts(connection).sweep(job.origin, time.time(), 600)
    assert connection.zscore(registry, job.id) is None
