"""The state directory of a run, `OUTPUT.batonq/`: a lock, the index of the input, the embedded server's data, logs."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

from batonq.producer.errors import StateError
from batonq.producer.index import Index, IndexedRow
from batonq.producer.rows import job_id, parse_row, read_lines

#: Children of a run that was killed hold its lock for the moment that they outlive it.
_LOCK_SECONDS = 2.0
_SIGNATURE_BYTES = 1 << 16
_REPORT_EVERY = 50_000


class RunState:
    """The state directory of one output, locked for as long as this object and the run's children live."""

    def __init__(self, output: Path) -> None:
        """Make or open the directory. Raises StateError that names the process that holds it."""
        self.output = output.resolve()
        self.directory = self.output.with_name(self.output.name + ".batonq")
        self.directory.mkdir(mode=0o700, exist_ok=True)
        #: Inherited by the run's children, so that nobody else starts while one of them lives.
        self.lock = self._take_lock()
        self.index = Index(self.directory / "index.sqlite")
        self.run_id = self.index.get("run_id") or self._new_run()

    def close(self) -> None:
        """Close the index and let go of the lock."""
        self.index.close()
        os.close(self.lock)

    def start_afresh(self) -> None:
        """Forget what the run had done. Its jobs get other ids; the former ones are stale."""
        self.run_id = self._new_run()
        for name in ("input", "model", "error_files"):
            self.index.drop(name)

    def bind_model(self, name: str) -> None:
        """A run keeps its model. Raises StateError if it was begun with another."""
        begun_with = self.index.get("model") or name
        if begun_with != name:
            message = (
                f"the run into {self.output} was begun with model {begun_with}; use it, another output, or --overwrite"
            )
            raise StateError("other_model", message, model=name, begun_with=begun_with)
        self.index.put("model", name)

    def index_input(self, path: Path, model: str, report: Callable[[int], None]) -> None:
        """Index the input unless that is done and it is unchanged; `report` hears how many rows were read."""
        signature = _signature(path)
        if self.index.get("input") == signature:
            return
        self.index.drop("input")  # until the new index is whole
        self.index.drop("other_model")
        self.index.rebuild(self._scan(path, model, report))
        self.index.put("input", signature)

    def note_error_file(self, path: Path | None) -> list[Path]:
        """Every file that this run's error rows have gone to, now or in an earlier run."""
        known = json.loads(self.index.get("error_files") or "[]")
        if path is not None and str(path.resolve()) not in known:
            known.append(str(path.resolve()))
            self.index.put("error_files", json.dumps(known))
        return [Path(name) for name in known]

    def _scan(self, path: Path, model: str, report: Callable[[int], None]) -> Iterator[IndexedRow]:
        with path.open("rb") as file:
            for count, line in enumerate(read_lines(file), 1):
                row = parse_row(line)
                if row.job is not None and row.job.model not in (None, model) and self.index.get("other_model") is None:
                    self.index.put("other_model", f"line {line.number} asks for model {row.job.model}")
                if count % _REPORT_EVERY == 0:
                    report(count)
                yield IndexedRow(
                    row.number,
                    line.offset,
                    line.length,
                    row.custom_id,
                    job_id(self.run_id, row),
                    row.chat,
                    error=row.error,
                )

    def _new_run(self) -> str:
        run_id = secrets.token_hex(8)
        self.index.put("run_id", run_id)
        return run_id

    def _take_lock(self) -> int:
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    holder = os.pread(lock, 32, 0).decode().strip()
                    os.close(lock)
                    message = f"process {holder} is running into {self.output} already"
                    raise StateError("run_locked", message, pid=holder) from None
                time.sleep(0.01)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        return lock


def _signature(path: Path) -> str:
    """What tells whether a file has changed: size, time of change, and a digest of its head and tail."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        digest = blake2b(file.read(_SIGNATURE_BYTES), digest_size=16)
        file.seek(max(0, status.st_size - _SIGNATURE_BYTES))
        digest.update(file.read(_SIGNATURE_BYTES))
    return f"{status.st_size} {status.st_mtime_ns} {digest.hexdigest()}"
