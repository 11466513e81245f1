"""A record of every sample that an engine's process drew, for whoever wants to prove that none was drawn twice.

Off unless `BATONQ_STEP_LOG` names a directory. Each process appends to a file of its own there, one write a step, so
that a kill at any moment leaves whole lines; on a file system in memory (/dev/shm) that costs microseconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from batonq.engine.engine import Engine
from batonq.engine.plan import StepOutput

VARIABLE = "BATONQ_STEP_LOG"


class Sample(NamedTuple):
    """One token that was drawn: when (the machine's monotonic clock, seconds), for which context, in which place."""

    at: float
    context_id: str
    position: int
    token_id: int


class StepLog:
    """The file of this process."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{os.getpid()}-{time.monotonic_ns()}"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    @classmethod
    def wanted(cls) -> StepLog | None:
        """The log, if the environment asks for one."""
        directory = os.environ.get(VARIABLE)
        return cls(Path(directory)) if directory else None

    def write(self, output: StepOutput, engine: Engine[Any]) -> None:
        """Note the tokens that a step drew."""
        now, lines = time.monotonic(), []
        for part in output.outputs:
            first = len(engine.contexts[part.context_id].output_token_ids) - len(part.new_token_ids)
            lines += [f"{now} {part.context_id} {first + i} {token}\n" for i, token in enumerate(part.new_token_ids)]
        os.write(self._fd, "".join(lines).encode())


def read(path: Path) -> Iterator[Sample]:
    """The samples of one process; the end of one that is being written is left out."""
    for line in path.read_text().split("\n")[:-1]:
        at, context_id, position, token_id = line.split(" ")
        yield Sample(float(at), context_id, int(position), int(token_id))
