"""Real worker processes over the null engine, with what a test wants to know of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from rq.job import Job

from batonq.producer.schema import Result
from tests.support import null_worker
from tests.support.servers import eventually

QUEUE = "null"
ROOT = Path(__file__).parents[2]


def command(url: str, name: str, *options: str) -> list[str]:
    where = ["--redis-url", url, "--model", QUEUE, "--engine", "tests.support.null_worker", "--name", name]
    return [sys.executable, "-m", "batonq.worker", *where, *options]


def status(job: Job) -> str:
    return str(job.get_status().value)


def result_of(job: Job) -> Result:
    latest = job.latest_result()
    assert latest is not None
    return Result.model_validate(latest.return_value)


def error_of(job: Job) -> str:
    error = result_of(job).error
    assert error is not None
    return error.code


class WorkerProcess:
    def __init__(self, url: str, name: str, *options: str, log: Path, **engine: float | str) -> None:
        self.name = name
        self.log = log
        environment = os.environ | {null_worker.ENVIRONMENT: json.dumps(engine)}
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                command(url, name, *options), env=environment, cwd=ROOT, stderr=sink, stdin=subprocess.DEVNULL
            )

    def child(self) -> psutil.Process:
        """The engine's process."""
        return eventually(lambda: psutil.Process(self.process.pid).children(), "the engine's process is there")[0]

    def wait(self) -> int:
        return self.process.wait(60)


@contextmanager
def worker(url: str, name: str, *options: str, log: Path, **engine: float | str) -> Iterator[WorkerProcess]:
    """A worker that is killed, with its child, when the test leaves it running."""
    running = WorkerProcess(url, name, *options, log=log, **engine)
    children = []
    try:
        yield running
    finally:
        if running.process.poll() is None:
            children = psutil.Process(running.process.pid).children()
            running.process.kill()
            running.process.wait()
        _, alive = psutil.wait_procs(children, 10)
        assert not alive, "the child outlived its parent"
