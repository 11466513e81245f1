"""What is measured: the engine alone, a worker through Redis, `batonq run`, and transformers' padded batches.

Each runs requests past EOS, so that each makes exactly `max_tokens` tokens, and returns the seconds that took; loading
and the start of processes are not in them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from batonq.engine.engine import Engine
from batonq.engine.sampling_params import SamplingParams
from batonq.producer import Producer, PromptJob, keys
from batonq.producer.embedded import EmbeddedServer
from benchmarks.subject_process import padded_batches
from benchmarks.workloads import Request

MODEL = "smollm2-135m"

#: Runs the requests, and returns the seconds it took.
Subject = Callable[[list[Request]], float]


def sampling(request: Request) -> SamplingParams:
    return SamplingParams(
        temperature=request.temperature, top_p=request.top_p, max_tokens=request.max_tokens, seed=0, ignore_eos=True
    )


def engine_alone(engine: Engine) -> Subject:  # type: ignore[type-arg]
    def run(requests: list[Request]) -> float:
        begin = time.perf_counter()
        done = engine.generate([r.prompt_ids for r in requests], [sampling(r) for r in requests])
        seconds = time.perf_counter() - begin
        assert [len(output.token_ids) for output in done] == [r.max_tokens for r in requests]
        return seconds

    return run


@dataclass
class Fleet:
    """A server and one worker."""

    url: str
    directory: Path
    worker: subprocess.Popen[bytes]
    server_pid: int
    #: From the start of the worker's process until it was registered.
    seconds_to_ready: float

    def through_redis(self, requests: list[Request]) -> float:
        """From the first enqueue until the last result is read."""
        producer = Producer(self.url)
        begin = time.perf_counter()
        jobs = [PromptJob(model=MODEL, token_ids=tuple(r.prompt_ids), sampling=sampling(r)) for r in requests]
        for job_id, request in zip(producer.submit_many(jobs), requests, strict=True):
            result = producer.result(job_id)
            assert result.usage is not None, result.error
            assert result.usage.completion_tokens == request.max_tokens
        seconds = time.perf_counter() - begin
        producer.connection.close()
        return seconds

    def run_over_a_file(self, requests: list[Request]) -> float:
        """From `running`, which `batonq run` says before its first enqueue, until it has ended."""
        with tempfile.TemporaryDirectory(dir=self.directory) as name:
            source, output = Path(name) / "in.jsonl", Path(name) / "out.jsonl"
            rows = [
                {"token_ids": r.prompt_ids, **sampling(r).model_dump(exclude_defaults=True, mode="json")}
                for r in requests
            ]
            source.write_text("".join(json.dumps(row) + "\n" for row in rows))
            program = [sys.executable, "-c", "from batonq.producer.cli import main; main()", "run"]
            options = ["-i", str(source), "-o", str(output), "--model", MODEL, "--redis-url", self.url]
            process = subprocess.Popen([*program, *options], stderr=subprocess.PIPE, text=True)
            assert process.stderr is not None
            while (line := process.stderr.readline()) and line != "batonq: running\n":
                continue
            begin = time.perf_counter()
            _, shown = process.communicate()
            seconds = time.perf_counter() - begin
            assert process.returncode == 0, shown
            made = (json.loads(line)["response"]["body"]["usage"] for line in output.read_text().splitlines())
            assert sum(usage["completion_tokens"] for usage in made) == sum(r.max_tokens for r in requests)
        return seconds

    def cpu_seconds(self) -> float:
        """Processor time that the worker's parent has used."""
        return cpu_seconds(self.worker.pid)

    def server_cpu_seconds(self) -> float:
        """Processor time that the server has used."""
        return cpu_seconds(self.server_pid)


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def fleet(*options: str) -> Iterator[Fleet]:
    """A server and a worker with `options`, ready."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        server = EmbeddedServer(directory / "server")
        command = [sys.executable, "-m", "batonq.worker", "--redis-url", server.url, "--model", MODEL, *options]
        producer = Producer(server.url)
        begin = time.perf_counter()
        worker = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            while not producer.connection.scard(keys.workers_of_queue(MODEL)):
                if worker.poll() is not None:
                    raise SystemExit("the worker ended before it was ready")
                time.sleep(0.005)
            yield Fleet(server.url, directory, worker, server.process.pid, time.perf_counter() - begin)
        finally:
            producer.connection.close()
            worker.terminate()
            worker.wait()
            server.stop()


def transformers_padded(directory: Path, dtype: str) -> Subject:
    """Padded batches, as `peers.py` runs them."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    generate = padded_batches(AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval())

    def run(requests: list[Request]) -> float:
        begin = time.perf_counter()
        generate([vars(request) for request in requests])
        return time.perf_counter() - begin

    return run
