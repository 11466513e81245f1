"""How long contexts stand still when a worker dies: from SIGKILL to the next token, drawn by another worker.

    python -m benchmarks.takeover [--rounds 7] [--lease 10] [--contexts 8] [--dtype bfloat16] [--num-threads 2]

Two warm workers; one of them runs all the contexts, which are between 64 and 256 tokens long. Killed
is its engine, or its parent (and with it the engine). A parent's death is measured twice: as on one machine, where a
dead process is recognised, and as from another, where only the lease tells. Printed are medians over contexts and
rounds, and how old the oldest sample was, at the kill, that had to be drawn again.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import redis

from batonq.producer import Producer, PromptJob, keys
from batonq.producer.embedded import EmbeddedServer
from batonq.worker import step_log
from benchmarks.subjects import MODEL

_T = TypeVar("_T")


#: Nothing that is waited for takes so long, unless something is wrong.
_PATIENCE = 60.0


def eventually(condition: Callable[[], _T]) -> _T:
    deadline = time.monotonic() + _PATIENCE
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited for {_PATIENCE:g} s in vain")
        time.sleep(0.002)
    return value


class Pair:
    """A server and two workers; the second is started when the first has taken every job, which stands still for it."""

    def __init__(self, directory: Path, options: list[str]) -> None:
        self.samples = directory / "samples"
        self.server = EmbeddedServer(directory / "server")
        self.connection = redis.Redis.from_url(self.server.url)
        self._options = options
        self.workers: list[subprocess.Popen[bytes]] = []

    def start_worker(self) -> None:
        name = f"w{len(self.workers)}"
        command = [sys.executable, "-m", "batonq.worker", "--redis-url", self.server.url, "--model", MODEL]
        environment = os.environ | {step_log.VARIABLE: str(self.samples)}
        process = subprocess.Popen(
            [*command, "--name", name, *self._options], env=environment, stderr=subprocess.DEVNULL
        )
        self.workers.append(process)
        eventually(lambda: self.connection.exists(keys.worker(name)))

    def engine(self, worker: int) -> int:
        """Process id of a worker's engine."""
        pid = self.workers[worker].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def samples_of(self, pid: int) -> list[step_log.Sample]:
        return [s for path in self.samples.glob(f"{pid}-*") for s in step_log.read(path)]

    def stop(self) -> None:
        for process in self.workers:
            process.terminate()
        for process in self.workers:
            process.wait()
        self.connection.close()
        self.server.stop()


def measure(kind: str, contexts: int, options: list[str]) -> tuple[list[float], float]:
    """Seconds from the kill to each context's next token, and the age at the kill of the oldest sample drawn again."""
    chance = random.Random(0)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        pair = Pair(Path(name), options)
        producer = Producer(pair.server.url)
        jobs = [
            PromptJob(
                model=MODEL,
                token_ids=tuple(chance.choices(range(1000, 40000), k=chance.randint(40, 200))),
                sampling={"max_tokens": 400, "ignore_eos": True, "seed": i},
            )
            for i in range(contexts)
        ]
        ids = producer.submit_many(jobs)

        def all_have(tokens: int) -> bool:
            return all(pair.connection.strlen(keys.tokens(job_id)) >= tokens * 4 for job_id in ids)

        pair.start_worker()
        eventually(lambda: all_have(24))
        victim = pair.engine(0)
        for pid in (pair.workers[0].pid, victim):
            os.kill(pid, signal.SIGSTOP)
        pair.start_worker()
        for pid in (pair.workers[0].pid, victim):
            os.kill(pid, signal.SIGCONT)
        eventually(lambda: all_have(32))
        heir = pair.engine(1)
        if kind == "machine":
            pair.connection.hdel(keys.worker("w0"), "batonq_process")  # now nobody can look the process up
        killed = time.monotonic()
        os.kill(victim if kind == "engine" else pair.workers[0].pid, signal.SIGKILL)
        first: dict[str, float] = {}

        def all_go_on() -> bool:
            first.clear()
            for sample in pair.samples_of(heir):
                first.setdefault(sample.context_id, sample.at)
            return len(first) == contexts

        eventually(all_go_on)
        again = {(s.context_id, s.position) for s in pair.samples_of(heir)}
        ages = [killed - s.at for s in pair.samples_of(victim) if (s.context_id, s.position) in again]
        producer.connection.close()
        pair.stop()
        return [at - killed for at in first.values()], max(ages, default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lease", type=float, default=10.0)
    parser.add_argument("--contexts", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-threads", type=int, help="of each worker; default: all cores")
    args = parser.parse_args()
    options = ["--dtype", args.dtype, "--lease", str(args.lease)]
    options += ["--num-threads", str(args.num_threads)] if args.num_threads else []
    for kind, what in (
        ("engine", "the engine is killed"),
        ("process", "the parent is killed, on the same machine"),
        ("machine", f"the parent is killed, on another machine, lease {args.lease:g} s"),
    ):
        rounds = [measure(kind, args.contexts, options) for _ in range(args.rounds)]
        stood = [seconds for stood, _ in rounds for seconds in stood]
        print(
            f"{what}: next token after {statistics.median(stood):.2f} s (median; {min(stood):.2f} to "
            f"{max(stood):.2f}), oldest sample drawn again {max(age for _, age in rounds) * 1e3:.0f} ms old",
            flush=True,
        )


if __name__ == "__main__":
    main()
