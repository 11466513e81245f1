"""What the queue costs: the engine alone, a worker through Redis, and `batonq run` from first enqueue to last row.

    python -m benchmarks.run_overhead [WORKLOAD.jsonl] [--requests 16] [--rounds 3]

A workload has a request a line: `prompt_ids`, `max_tokens`; without one, requests are made from Python's documentation.
The three run in turn, round after round, greedy and past EOS, so that each makes exactly `max_tokens` tokens.
Loading, the start of processes and the first round are not counted. Each time a prompt begins with another token, so
that no prefix cache helps. Ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from batonq.engine.config import EngineConfig
from batonq.engine.engine import Engine
from batonq.engine.loading import EngineOptions, load_engine
from batonq.producer import Producer, PromptJob, keys
from batonq.producer.embedded import EmbeddedServer
from benchmarks.bench import MODEL, greedy
from benchmarks.workloads import Request, mixed

#: Runs the requests, and returns the seconds it took.
Subject = Callable[[list[Request]], float]

#: Token ids that are no special ones, to begin prompts with.
_FIRST_TOKEN = count(1000)


def read_workload(path: Path, limit: int) -> list[Request]:
    with path.open() as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(limit), strict=False)]
    return [Request(row["prompt_ids"], row["max_tokens"]) for row in rows]


def cold(requests: list[Request]) -> list[Request]:
    """The same with a first token that no prompt had before."""
    first = next(_FIRST_TOKEN)
    return [Request([first, *r.prompt_ids[1:]], r.max_tokens) for r in requests]


def engine_alone(engine: Engine) -> Subject:  # type: ignore[type-arg]
    def run(requests: list[Request]) -> float:
        begin = time.perf_counter()
        engine.generate([r.prompt_ids for r in requests], [greedy(r) for r in requests])
        return time.perf_counter() - begin

    return run


@dataclass
class Fleet:
    """A server and one worker."""

    url: str
    directory: Path
    worker: subprocess.Popen[bytes]

    def through_redis(self, requests: list[Request]) -> float:
        """From the first enqueue until the last result is read."""
        producer = Producer(self.url)
        begin = time.perf_counter()
        jobs = [PromptJob(model=MODEL, token_ids=tuple(r.prompt_ids), sampling=greedy(r)) for r in requests]
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
                {"token_ids": r.prompt_ids, **greedy(r).model_dump(exclude_defaults=True, mode="json")}
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
        ticks = Path(f"/proc/{self.worker.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def fleet() -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        server = EmbeddedServer(directory / "server")
        command = [sys.executable, "-m", "batonq.worker", "--redis-url", server.url, "--model", MODEL]
        worker = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        producer = Producer(server.url)
        try:
            while not producer.connection.scard(keys.workers_of_queue(MODEL)):
                if worker.poll() is not None:
                    raise SystemExit("the worker ended before it was ready")
                time.sleep(0.05)
            yield Fleet(server.url, directory, worker)
        finally:
            producer.connection.close()
            worker.terminate()
            worker.wait()
            server.stop()


def measure(subjects: dict[str, Subject], requests: list[Request], rounds: int) -> dict[str, list[float]]:
    """Tokens per second of every subject in every round but the first, which is of a few requests and warms up."""
    rates: dict[str, list[float]] = {name: [] for name in subjects}
    for index in range(rounds + 1):
        part = requests if index else requests[:4]
        for name, run in subjects.items():
            rate = sum(r.max_tokens for r in part) / run(cold(part))
            if index:
                rates[name].append(rate)
                print(f"round {index}  {name:22} {rate:8.1f} output tokens/s", flush=True)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", type=Path)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with ExitStack() as stack:
        engine, _ = load_engine(EngineOptions(MODEL, config=EngineConfig()).to_dict())
        if args.workload is None:
            requests = mixed(engine.encoder.encode, args.requests, 0)
        else:
            requests = read_workload(args.workload, args.requests)
        running = stack.enter_context(fleet())
        subjects = {
            "engine alone": engine_alone(engine),
            "worker through Redis": running.through_redis,
            "batonq run": running.run_over_a_file,
        }
        before = running.cpu_seconds()
        rates = measure(subjects, requests, args.rounds)
        used = running.cpu_seconds() - before
    made = sum(r.max_tokens for r in requests) * args.rounds * 2
    print(f"\n{MODEL}, {len(requests)} requests, {args.rounds} rounds")
    for name, values in rates.items():
        ratio = statistics.median(a / b for a, b in zip(values, rates["engine alone"], strict=True))
        print(f"{name:22} {statistics.median(values):8.1f} output tokens/s   {ratio:.3f} of the engine alone")
    print(f"the worker's parent used {used / made * 1e6:.0f} µs of processor time per output token")


if __name__ == "__main__":
    main()
