"""A fleet of real workers over a tiny model, on a server of its own, and all that becomes of a set of jobs on it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import redis

from batonq.producer import Producer, keys
from batonq.producer.embedded import EmbeddedServer
from batonq.producer.schema import PromptJob
from batonq.worker import step_log
from batonq.worker.messages import unpack_ids
from tests.support import faulty_engine, tiny_models
from tests.support.servers import eventually, server

QUEUE = "tiny"
ROOT = Path(__file__).parents[2]

#: Kinds of jobs, in turn; each is greedy or has a seed.
_KINDS: tuple[dict[str, Any], ...] = (
    {"sampling": {"temperature": 0}},
    {"sampling": {"temperature": 0.9, "top_p": 0.9}},
    {"sampling": {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.1}, "stream": True},
    {"sampling": {"temperature": 0.7, "top_k": 20, "presence_penalty": 0.5, "min_tokens": 20}},
    {"sampling": {"temperature": 1.0, "logprobs": 2}, "stream": True},
    {"sampling": {"temperature": 0.8}, "n": 2, "stream": True},
    {"sampling": {"temperature": 1.0, "stop": ["qz", "é", "\n\n"], "ignore_eos": False}, "stream": True},
    {"sampling": {"temperature": 0.6, "logprobs": 0}, "n": 2},
)


def jobs(count: int, most_tokens: int, prefix: str = "job") -> list[PromptJob]:
    """Jobs of every kind: greedy and sampled, penalties, stop strings, two outputs, log probabilities, streams."""
    chance, made = random.Random(count), []
    for i in range(count):
        kind = _KINDS[i % len(_KINDS)]
        sampling = {"ignore_eos": True, "max_tokens": chance.randint(most_tokens // 4, most_tokens), "seed": i}
        tokens = tuple(chance.choices(range(256), k=chance.randint(3, 90)))
        fields = kind | {"sampling": sampling | kind["sampling"]}
        made.append(PromptJob(id=f"{prefix}-{i}", model=QUEUE, token_ids=tokens, **fields))
    return made


@dataclass(frozen=True)
class Outcome:
    """What has to be the same, whatever happened: choices with tokens, texts and log probabilities, and the streams."""

    choices: Any
    #: Of each context: texts and token ids of its entries, joined, and its end mark.
    streams: list[tuple[bytes, list[int], bytes]]


@dataclass
class FleetWorker:
    """One worker process, and its child as far as it has one."""

    name: str
    process: subprocess.Popen[bytes]

    def child(self) -> psutil.Process | None:
        with suppress(psutil.Error):
            return next(iter(psutil.Process(self.process.pid).children()), None)
        return None


@dataclass
class Fleet:
    """A server, workers that are started anew when they end, and a log of every sample and every kill."""

    directory: Path
    model: Path
    valkey: EmbeddedServer
    options: Sequence[str]
    #: Of the engine, as `faulty_engine` reads them.
    faults: dict[str, Any] = field(default_factory=dict)
    #: Where workers find the server, if not where it is; and more of their environment.
    url: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    #: Names of workers by slot, where they are not to be new ones each time.
    names: dict[int, str] = field(default_factory=dict)
    workers: dict[int, FleetWorker] = field(default_factory=dict)
    #: Process id of each child that was killed, and when.
    kills: dict[int, float] = field(default_factory=dict)
    kill_kinds: Counter[str] = field(default_factory=Counter)
    _started: int = 0

    @property
    def samples(self) -> Path:
        return self.directory / "samples"

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def start_worker(self, slot: int) -> FleetWorker:
        self._started += 1
        name = self.names.get(slot) or f"w{slot}-{self._started}"
        where = ["--redis-url", self.url or self.valkey.url, "--model", str(self.model), "--served-model-name", QUEUE]
        command = [sys.executable, "-m", "batonq.worker", *where, "--name", name, *self.options]
        command += ["--engine", "tests.support.faulty_engine"]
        environment = os.environ | {step_log.VARIABLE: str(self.samples), "BATONQ_NUM_THREADS": "1"}
        environment |= {faulty_engine.FAULTS: json.dumps(self.faults)} | self.environment
        with (self.directory / "log").open("ab") as sink:
            process = subprocess.Popen(command, env=environment, cwd=ROOT, stderr=sink, stdin=subprocess.DEVNULL)
        self.workers[slot] = FleetWorker(name, process)
        return self.workers[slot]

    @contextmanager
    def supervised(self, count: int) -> Iterator[None]:
        """`count` workers, each started anew when it has ended; all are stopped in order at the end."""
        stopping = threading.Event()

        def supervise() -> None:
            while not stopping.wait(0.05):
                for slot, each in list(self.workers.items()):
                    if each.process.poll() is not None:
                        self.start_worker(slot)

        for slot in range(count):
            self.start_worker(slot)
        thread = threading.Thread(target=supervise)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()
            self.stop()

    def await_ready(self, slot: int) -> None:
        name = self.workers[slot].name
        with redis.Redis.from_url(self.valkey.url) as connection:
            eventually(lambda: connection.exists(keys.worker(name)), f"{name} is ready")

    def await_end(self, made: Sequence[PromptJob], seconds: float = 120) -> None:
        """Until every job has ended."""
        with redis.Redis.from_url(self.valkey.url) as connection:
            eventually(lambda: not self.unfinished(connection, made), "every job ends", seconds)

    def stop(self) -> None:
        for each in self.workers.values():
            each.process.send_signal(signal.SIGCONT)
            each.process.terminate()
        for each in self.workers.values():
            each.process.wait(60)

    def kill(self, slot: int, kind: str) -> None:
        """SIGKILL a worker's child, its parent, or both."""
        victim = self.workers[slot]
        child = victim.child()
        now = time.monotonic()
        if child is not None:
            self.kills[child.pid] = now
            if kind != "parent":
                with suppress(psutil.Error):
                    child.kill()
        if kind != "child":
            victim.process.kill()
        self.kill_kinds[kind] += 1

    def submit(self, made: Sequence[PromptJob]) -> None:
        producer = Producer(self.valkey.url)
        producer.submit_many(made)
        producer.connection.close()

    def unfinished(self, connection: redis.Redis, made: Sequence[PromptJob]) -> int:
        with connection.pipeline(transaction=False) as pipeline:
            for job in made:
                pipeline.hget(keys.job(str(job.id)), "status")
            return sum(status not in (b"finished", b"failed", b"stopped") for status in pipeline.execute())

    def outcomes(self, made: Sequence[PromptJob]) -> dict[str, Outcome]:
        """What became of each; one that failed has its error for choices."""
        producer = Producer(self.valkey.url)
        found = {}
        for job_id, result in producer.results(str(job.id) for job in made).items():
            choices = result.error if result.error else [choice.model_dump() for choice in result.choices]
            n = max(1, len(result.choices))
            streams = [read_stream(producer.connection, name) for name in keys.context_ids(job_id, n)]
            found[job_id] = Outcome(choices, streams)
        producer.connection.close()
        return found

    def errors(self, ids: Sequence[str]) -> dict[str, str]:
        """Codes of the errors of jobs that failed."""
        producer = Producer(self.valkey.url)
        found = {job_id: result.error.code for job_id, result in producer.results(ids).items() if result.error}
        producer.connection.close()
        return found

    def drawn(self) -> list[tuple[str, int]]:
        """Context and position of every sample, those drawn again as often as they were."""
        return [(s.context_id, s.position) for path in self.samples.iterdir() for s in step_log.read(path)]

    def history(self, job: PromptJob) -> list[tuple[str, str, int]]:
        """Events between a job's first claim and its end: what, which worker, committed tokens."""
        with redis.Redis.from_url(self.valkey.url) as connection:
            lines = (connection.hget(keys.job(str(job.id)), "batonq_history") or b"").decode().splitlines()
        return [(event, name, int(tokens)) for _, event, name, _, tokens in (line.split(" ") for line in lines)]


def read_stream(connection: redis.Redis, context_id: str) -> tuple[bytes, list[int], bytes]:
    """Text and tokens of a stream, joined, and the mark of its end; all empty if there is none. Checks the ids."""
    text, tokens, end = b"", list[int](), b""
    for entry_id, fields in connection.xrange(keys.stream(context_id)):
        if b"finish_reason" in fields or b"error" in fields:
            assert entry_id.decode() == f"{len(tokens)}-1"
            end = fields.get(b"finish_reason", b"error")
            text += fields.get(b"text", b"")
            continue
        assert not end, f"{context_id}: text after its end"
        text += fields[b"text"]
        tokens += unpack_ids(fields[b"token_ids"])
        assert entry_id.decode() == f"{len(tokens)}-0"
    return text, tokens, end


@contextmanager
def fleet(directory: Path, *options: str, model: Path | None = None, **faults: Any) -> Iterator[Fleet]:
    """A fleet without workers yet. `options` are those of each, `faults` those of its engine."""
    directory.mkdir(parents=True, exist_ok=True)
    model = model or tiny_model(directory / "model")
    with server(directory / "valkey") as valkey:
        made = Fleet(directory, model, valkey, ["--kv-cache-memory", "16MiB", "--max-num-seqs", "8", *options], faults)
        try:
            yield made
        finally:
            for each in made.workers.values():
                each.process.kill()
                each.process.wait()


def calm_outcomes(directory: Path, model: Path, made: Sequence[PromptJob]) -> dict[str, Outcome]:
    """What becomes of jobs where nothing happens: one worker, on a server of its own."""
    with fleet(directory, model=model) as quiet:
        quiet.submit(made)
        quiet.start_worker(0)
        quiet.await_end(made, 300)
        return quiet.outcomes(made)


def tiny_model(directory: Path) -> Path:
    """A tiny model with a tokenizer of bytes."""
    tiny_models.save("bytes", directory)
    tiny_models.save_tokenizer(directory)
    return directory
