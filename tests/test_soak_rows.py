"""Very many tiny rows: the memory of run, worker and server doesn't grow with them, nor that of the index.

The full size, `BATONQ_SOAK_ROWS`, is for `make soak`; the suite runs a small one.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
import redis

from batonq.producer.client import connect
from tests.support import null_worker
from tests.support.running import NULL_WORKER_COMMAND, command, environment, state_directory

SOAK_ROWS = int(os.environ.get("BATONQ_SOAK_ROWS", "1000000"))
_MIB = 1 << 20

sizes = pytest.mark.parametrize("rows", [20_000, pytest.param(SOAK_ROWS, marks=pytest.mark.soak)])


def write_tiny_rows(path: Path, rows: int) -> None:
    with path.open("w") as file:
        for i in range(rows):
            file.write(f'{{"custom_id": "{i * 7919 % rows}-{i}", "prompt": "{i % 1000}", "max_tokens": 1}}\n')


class Memory:
    """Samples of the resident memory of a run and its children, and of what the server says it uses, by name."""

    def __init__(self, process: psutil.Process, socket: Path) -> None:
        self._process = process
        self._socket = socket
        self.samples: dict[str, list[int]] = defaultdict(list)

    def sample(self) -> None:
        try:
            for process in (self._process, *self._process.children(recursive=True)):
                words = process.cmdline()
                if words:
                    self.samples[self._name(words)].append(process.memory_info().rss)
        except psutil.NoSuchProcess:  # one that has just ended
            return
        # A server that the run stops at this very moment has nothing more to say.
        with contextlib.suppress(redis.ConnectionError), connect(f"unix://{self._socket}") as connection:
            self.samples["server's data"].append(connection.info("memory")["used_memory"])

    def _name(self, words: list[str]) -> str:
        for name, word in (("run", "run"), ("engine", "batonq.worker.child"), ("worker", "batonq.worker")):
            if word in words:
                return name
        return "server"

    def growth(self) -> dict[str, float]:
        """How much more MiB each needed at most in the second half of the time than in the first."""
        found = {}
        for name, sizes in self.samples.items():
            half = len(sizes) // 2
            found[name] = (max(sizes[half:]) - max(sizes[:half])) / _MIB
        return found


@sizes
def test_memory_is_flat(tmp_path: Path, rows: int, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_tiny_rows(source, rows)
    engine = {"max_num_seqs": 256, "max_num_batched_tokens": 1024, "num_blocks": 4096}
    process = subprocess.Popen(
        command(source, output, "--worker-command", NULL_WORKER_COMMAND, own_worker=False),
        env=environment(**{null_worker.ENVIRONMENT: json.dumps(engine)}),
        stderr=subprocess.DEVNULL,
    )
    memory = Memory(psutil.Process(process.pid), state_directory(output) / "valkey" / "server.sock")
    started = None
    while process.poll() is None:
        if output.exists() and output.stat().st_size:
            started = started or time.monotonic()
            memory.sample()
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    assert process.returncode == 0
    assert started is not None
    seconds = time.monotonic() - started
    with output.open("rb") as file:
        assert sum(1 for _ in file) == rows
    peaks = {name: max(sizes) / _MIB for name, sizes in memory.samples.items()}
    growth = memory.growth()
    with capsys.disabled():
        shown = ", ".join(f"{name} {peak:.0f} MiB ({growth[name]:+.1f})" for name, peak in peaks.items())
        sys.stdout.write(f"\n{rows} rows, {rows / seconds:.0f} rows/s; peaks (growth): {shown}\n")
    assert set(peaks) == {"run", "worker", "engine", "server", "server's data"}
    assert all(more < 12 for more in growth.values()), growth


_INDEX = """
import sys, psutil
from pathlib import Path
from batonq.producer.matching import match_output
from batonq.producer.state import RunState
source, output = map(Path, sys.argv[1:])
rss = psutil.Process().memory_info
state = RunState(output)
state.index_input(source, "tiny", lambda _count: print(rss().rss, flush=True))
match_output(state.index, [output], last=10**9, order=True)
print(rss().rss)
assert list(state.index.unfinished(0, 10**9, 1))[0].number == state.index.last_number(None)
"""


@pytest.mark.soak
def test_the_index_is_built_and_matched_in_flat_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_tiny_rows(source, SOAK_ROWS)
    with source.open() as rows, output.open("w") as lines:
        for _ in range(SOAK_ROWS - 1):
            custom_id = json.loads(rows.readline())["custom_id"]
            fields = {"custom_id": custom_id, "response": {"status_code": 200}, "error": None}
            lines.write(json.dumps(fields) + "\n")
    begin = time.monotonic()
    program = [sys.executable, "-c", _INDEX, str(source), str(output)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    seconds = time.monotonic() - begin
    sizes = [int(line) / _MIB for line in done.stdout.split()]
    with capsys.disabled():
        rate = SOAK_ROWS / seconds
        sys.stdout.write(f"\n{SOAK_ROWS} rows indexed and matched, {rate:.0f} rows/s; MiB on the way: {sizes[::4]}\n")
    assert len(sizes) > 10
    # The index's page cache fills up first; from then on nothing grows.
    assert max(sizes[len(sizes) * 2 // 3 :]) - max(sizes[: len(sizes) * 2 // 3]) < 12, sizes
