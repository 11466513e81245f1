"""Keeps a bounded number of rows under way, and writes each as it ends.

A row is written to the output, then its job is deleted from Redis, and then it is recorded in the index as finished. So
a kill between any two of these loses nothing, does nothing twice and leaves nothing behind: what the output has is
finished, what Redis knows is not enqueued again, and what the index has as enqueued may still be in Redis.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import BinaryIO

from batonq.producer import keys, output
from batonq.producer.client import BATCH, ENDED, Producer
from batonq.producer.errors import InputError
from batonq.producer.held import HeldLine
from batonq.producer.index import IndexedRow, RowState
from batonq.producer.progress import Reporter
from batonq.producer.rows import Line, job_id, parse_row
from batonq.producer.schema import PromptJob
from batonq.producer.sinks import Sinks
from batonq.producer.state import RunState


class Dispatch:
    """The rows of one run on their way through Redis."""

    def __init__(
        self,
        producer: Producer,
        state: RunState,
        source: BinaryIO,
        sinks: Sinks,
        reporter: Reporter,
        *,
        model: str,
        last: int,
        max_in_flight: int,
    ) -> None:
        """`last` is the line number of the last row to run; `max_in_flight` bounds the jobs of this run in Redis."""
        self._producer = producer
        self._state = state
        self._source = source
        self._sinks = sinks
        self._reporter = reporter
        self._model = model
        self._last = last
        self._max_in_flight = max_in_flight
        self._cursor = 0
        self._exhausted = False
        self._in_flight: dict[str, IndexedRow] = {}
        self._written: dict[str, tuple[IndexedRow, RowState]] = {}

    @property
    def finished(self) -> bool:
        """Whether every row is in the output."""
        return self._exhausted and not self._in_flight and not self._written

    @property
    def in_flight(self) -> int:
        """Rows now in Redis."""
        return len(self._in_flight)

    def refill(self) -> None:
        """Enqueue rows until enough are under way; rows that can't be run get their error at once."""
        while not self._exhausted and (room := self._max_in_flight - len(self._in_flight)) > 0:
            rows = self._state.index.unfinished(self._cursor, self._last, min(BATCH, room))
            if not rows:
                self._exhausted = True
                return
            self._write_errors([row for row in rows if row.error is not None])
            jobs = {row.job_id: row for row in rows if row.error is None}
            # Noted first: if the connection breaks now, `reconcile` finds out which of them got there.
            self._state.index.record((row.number, RowState.ENQUEUED) for row in jobs.values())
            self._in_flight.update(jobs)
            self._cursor = rows[-1].number
            self._enqueue(jobs.values())

    def wait(self, seconds: float) -> list[str]:
        """Wait until a worker tells of ended jobs; the ids it told of."""
        done = keys.done(self._state.run_id)
        first = self._producer.connection.blpop([done], timeout=seconds)
        if first is None:
            return []
        more = self._producer.connection.lpop(done, 4 * BATCH) or []
        return [item.decode() for item in (first[1], *more)]

    def collect(self, ids: Iterable[str]) -> None:
        """Write those of these jobs that have ended, delete them from Redis, record them."""
        ours = [job_id for job_id in dict.fromkeys(ids) if job_id in self._in_flight]
        for start in range(0, len(ours), BATCH):
            self._write_ended(ours[start : start + BATCH])
        if self._written:
            self._producer.delete(self._written)
            self._state.index.record((row.number, state) for row, state in self._written.values())
            self._written.clear()
            self._sinks.release()

    def reconcile(self, *, enqueue: bool = True) -> None:
        """Look at every row under way: write what has ended, and enqueue again what Redis doesn't know."""
        statuses = self._producer.statuses(self._in_flight)
        self.collect([job_id for job_id, status in statuses.items() if status in ENDED])
        lost = [self._in_flight[job_id] for job_id, status in statuses.items() if status is None]
        for start in range(0, len(lost) if enqueue else 0, BATCH):
            self._enqueue(lost[start : start + BATCH])

    def _enqueue(self, rows: Iterable[IndexedRow]) -> None:
        known = self._producer.enqueue([self._job(row) for row in rows])
        self.collect(known)  # an earlier run enqueued them; they may have ended long ago

    def _job(self, row: IndexedRow) -> PromptJob:
        self._source.seek(row.offset)
        parsed = parse_row(Line(row.number, row.offset, row.length, self._source.read(row.length)))
        if parsed.job is None or job_id(self._state.run_id, parsed) != row.job_id:
            message = f"line {row.number} of the input is no longer what it was; run again to read the input anew"
            raise InputError("input_changed", message, line=row.number)
        ours = {"id": row.job_id, "custom_id": row.custom_id, "model": self._model, "client_id": self._state.run_id}
        return parsed.job.model_copy(update=ours)

    def _write_ended(self, ids: list[str]) -> None:
        results = self._producer.results(ids)
        ended = [(self._in_flight[job_id], result) for job_id, result in results.items()]
        self._sinks.write(
            [
                HeldLine(row.number, row.job_id, result.error is not None, output.result_line(row, result))
                for row, result in ended
            ]
        )
        for row, result in ended:
            del self._in_flight[row.job_id]
            self._written[row.job_id] = (row, RowState.DONE if result.error is None else RowState.ERROR)
        self._reporter.add(
            rows=len(ended),
            errors=sum(result.error is not None for _, result in ended),
            tokens=sum(result.usage.completion_tokens for _, result in ended if result.usage),
            resumes=sum(result.resumes for _, result in ended),
        )

    def _write_errors(self, rows: list[IndexedRow]) -> None:
        if not rows:
            return
        lines = [(row, output.error_line(row, row.error)) for row in rows if row.error is not None]
        self._sinks.write([HeldLine(row.number, row.job_id, True, line) for row, line in lines])
        self._state.index.record((row.number, RowState.ERROR) for row in rows)
        self._sinks.release()
        self._reporter.add(rows=len(rows), errors=len(rows), tokens=0, resumes=0)
