"""Where finished rows go: the output and the file of errors, as they come or in the order of the input."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from batonq.producer.client import BATCH
from batonq.producer.held import HeldLine
from batonq.producer.index import Index
from batonq.producer.output import OutputFile

#: A line number behind every row.
_END = sys.maxsize


class Sinks:
    """Context manager; takes each line once. With `order` a line is held until every row before it is written."""

    def __init__(self, index: Index, output: Path, error_file: Path | None, *, order: bool, last: int) -> None:
        """`last` is the line number of the last row of this run: rows behind it are not waited for."""
        self._index = index
        self._order = order
        self._last = last
        self._turn = 0
        self._files = ExitStack()
        self._results = self._errors = OutputFile(output)
        self._files.callback(self._results.close)
        if error_file is not None:
            self._errors = OutputFile(error_file)
            self._files.callback(self._errors.close)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def write(self, lines: Sequence[HeldLine]) -> None:
        """Append lines, or keep them until their turn. Raises StateError if the disk refuses."""
        if self._order:
            self._index.held.put(lines)
        else:
            self._append(lines)

    def release(self) -> None:
        """Append the held lines whose turn has come; to be called when the index knows rows as finished."""
        turn = _END
        if self._order and (first := self._index.first_unfinished(self._turn, self._last)) is not None:
            self._turn = turn = first
        while lines := self._index.held.before(turn, BATCH):
            self._append(lines)
            self._index.held.drop(lines[-1].number)

    def _append(self, lines: Iterable[HeldLine]) -> None:
        parts: dict[OutputFile, list[bytes]] = {}
        for line in lines:
            parts.setdefault(self._errors if line.error else self._results, []).append(line.line)
        for file, part in parts.items():
            file.write(part)
