"""What the output files of earlier runs say about the rows of the input; the files are mended on the way."""

from __future__ import annotations

import sys
from pathlib import Path

from batonq.producer.held import HeldLine, Placement
from batonq.producer.index import Index, RowState
from batonq.producer.output import FinishedRow, mend


def match_output(
    index: Index, paths: list[Path], *, last: int, retry_errors: bool = False, order: bool = False
) -> None:
    """Take exactly the rows for finished that the files have or that are held.

    `retry_errors` takes the error rows up to line `last` of the input out of the files. `order` takes what stands there
    before its turn out of them, and holds it.
    """
    placement = index.placement() if order else None
    index.begin_matching()
    for file, path in enumerate(paths):
        mend(path, _Matching(index, placement, file, last if retry_errors else None), rewrite=retry_errors)
    index.held.match(retry_errors=last if retry_errors else None)
    index.end_matching()
    if placement is None:
        return
    turn = index.first_unfinished(0, last)
    for file, path in enumerate(paths):
        first = placement.first_early(file, sys.maxsize if turn is None else turn)
        if first is not None:
            mend(path, _Holding(index, placement, file, first), rewrite=True)


class _Matching:
    """Records each row of one file in the index, and where it stands."""

    def __init__(self, index: Index, placement: Placement | None, file: int, retry_errors: int | None) -> None:
        self._index = index
        self._placement = placement
        self._file = file
        self._retry_errors = retry_errors or 0
        self._position = 0

    def __call__(self, row: FinishedRow) -> bool:
        state = RowState.DONE if row.error_code is None else RowState.ERROR
        number = self._index.match(row.custom_id, state, duplicate_at=row.duplicate_at)
        if state is RowState.ERROR and number is not None and number <= self._retry_errors:
            self._index.retry(number)
            return False
        if self._placement is not None and number is not None:
            self._placement.add(self._file, self._position, number)
        self._position += 1
        return True


class _Holding:
    """Moves the rows of one file, from a position on, to the held lines. Rows that aren't in the input stay."""

    def __init__(self, index: Index, placement: Placement, file: int, first: int) -> None:
        self._index = index
        self._placement = placement
        self._file = file
        self._first = first
        self._position = 0

    def __call__(self, row: FinishedRow) -> bool:
        position = self._position
        self._position += 1
        if position < self._first or (number := self._placement.number(self._file, position)) is None:
            return True
        line = HeldLine(number, self._index.job_id(number), row.error_code is not None, row.line)
        self._index.held.put([line])
        return False
