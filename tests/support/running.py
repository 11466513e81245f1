"""`batonq run` as a process of its own, with the answering process for a worker, and what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from batonq.producer import keys
from batonq.producer.client import connect
from tests.support.answering import ANSWERED
from tests.support.servers import server

ANSWERING = str(Path(__file__).with_name("answering.py"))
WORKER_COMMAND = f"{sys.executable} {ANSWERING}"
#: A real worker over the null engine, which `null_worker.ENVIRONMENT` sizes.
NULL_WORKER_COMMAND = f"{sys.executable} -m batonq.worker --engine tests.support.null_worker"
_ROOT = Path(__file__).parents[2]
_PROGRAM = [sys.executable, "-c", "from batonq.producer.cli import main; main()"]


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Write a JSONL file; a row that is bytes is written as it is, without a line's end of its own."""
    lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows]
    path.write_bytes(b"".join(lines))
    return path


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"custom_id": f"row {i}", "prompt": f"prompt number {i}", "max_tokens": 5} for i in range(count)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def texts(path: Path) -> list[tuple[str, str]]:
    """Sorted pairs of custom_id and text or error code: what has to be equal between runs."""
    found = []
    for row in read_rows(path):
        if row["error"] is not None:
            found.append((row["custom_id"], row["error"]["code"]))
        else:
            choice = row["response"]["body"]["choices"][0]
            found.append((row["custom_id"], choice["text"] if "text" in choice else choice["message"]["content"]))
    return sorted(found)


def command(source: Path, output: Path, *options: str, own_worker: bool = True) -> list[str]:
    """Later options override; with `own_worker` the answering process is the worker."""
    worker = ["--worker-command", WORKER_COMMAND] if own_worker else []
    return [*_PROGRAM, "run", "-i", str(source), "-o", str(output), "--model", "tiny", *worker, *options]


def environment(answer_seconds: float = 0.0, **more: str) -> dict[str, str]:
    """Our own, without a Redis that a developer has set."""
    inherited = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    return inherited | {"ANSWER_SECONDS": str(answer_seconds)} | more


def start(source: Path, output: Path, *options: str, answer_seconds: float = 0.0) -> subprocess.Popen[str]:
    """Start a run in a session of its own, its stderr piped."""
    return subprocess.Popen(
        command(source, output, *options),
        env=environment(answer_seconds),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(
    source: Path, output: Path, *options: str, own_worker: bool = True, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(source, output, *options, own_worker=own_worker),
        env=dict(env) if env is not None else environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def state_directory(output: Path) -> Path:
    return output.with_name(output.name + ".batonq")


def leftovers(output: Path) -> list[psutil.Process]:
    """Living processes that work in or speak of the state directory."""
    found = []
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
            if str(output.parent) in words and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def answered(output: Path) -> list[str]:
    """The custom ids that the worker answered, each time it did, from the embedded server's data."""
    with server(state_directory(output) / "valkey") as running, connect(running.url) as connection:
        return [item.decode() for item in connection.lrange(ANSWERED, 0, -1)]


def jobs_in_redis(output: Path) -> list[str]:
    """Keys that jobs have left in the embedded server."""
    with server(state_directory(output) / "valkey") as running, connect(running.url) as connection:
        patterns = (keys.job("*"), keys.results("*"), keys.done("*"), keys.queue("*"))
        return [key.decode() for pattern in patterns for key in connection.scan_iter(pattern)]
