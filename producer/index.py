"""An index on disk of the rows of an input file: where each lies, what its job is called, and what became of it.

SQLite keeps memory flat for any number of rows and finds a custom_id used twice before any work is done. The index is a
cache: the output file says which rows are finished, Redis says which are under way, and the input says what they are.
So a write that a power loss takes back costs nothing but time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from batonq.producer.held import HeldLines, Placement
from batonq.producer.schema import ErrorInfo

_SCHEMA = """
CREATE TABLE rows (
    number INTEGER PRIMARY KEY,      -- of the line, from 1
    offset INTEGER NOT NULL,         -- in bytes
    length INTEGER NOT NULL,         -- in bytes, the line's end included
    custom_id TEXT NOT NULL,
    job_id TEXT NOT NULL,            -- digest of run, line and content
    chat INTEGER NOT NULL,
    state INTEGER NOT NULL DEFAULT 0,
    duplicate_of INTEGER,            -- line that has the custom_id already
    error TEXT                       -- why it can't be run, as JSON
);
CREATE UNIQUE INDEX one_custom_id ON rows (custom_id) WHERE duplicate_of IS NULL;
CREATE INDEX other_custom_ids ON rows (custom_id, number) WHERE duplicate_of IS NOT NULL;
"""

_COMMIT_EVERY = 100_000

#: Pages kept in memory, in KiB: names come in any order, and their index is looked at for each.
_CACHE_KIB = 64 * 1024
_SETTLED_CACHE_KIB = 4 * 1024


class RowState(IntEnum):
    """Where a row stands. DONE and ERROR are recorded when it is in the output and its job no longer in Redis."""

    PENDING = 0
    ENQUEUED = 1
    DONE = 2
    ERROR = 3


class IndexedRow(NamedTuple):
    """A row as the index knows it. `error` says why it cannot be run at all."""

    number: int
    offset: int
    length: int
    custom_id: str
    job_id: str
    chat: bool
    duplicate_of: int | None = None
    error: ErrorInfo | None = None

    @property
    def request_id(self) -> str:
        """Names the row's request in the output: the part of `job_id` that is the same in every run of the input."""
        return self.job_id.rpartition("-")[2]


class Counts(NamedTuple):
    """How many rows there are, and how many of them are finished with output or with an error."""

    total: int
    done: int
    errors: int


class Index:
    """The index in one SQLite file. Not for more than one process at a time (the state directory's lock sees to it)."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
        self._db.execute("CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
        self._db.execute("CREATE TABLE IF NOT EXISTS stale (job_id TEXT PRIMARY KEY)")
        self.held = HeldLines(self._db)

    def settle(self) -> None:
        """Give back the memory that building and matching took: from here on rows are touched once each, in order."""
        self._db.execute(f"PRAGMA cache_size=-{_SETTLED_CACHE_KIB}")
        self._db.execute("PRAGMA shrink_memory")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def get(self, name: str) -> str | None:
        """A note kept beside the rows."""
        found = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if found is None else str(found[0])

    def put(self, name: str, value: str) -> None:
        """Keep a note beside the rows."""
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def drop(self, name: str) -> None:
        """Forget a note."""
        self._db.execute("DELETE FROM meta WHERE name = ?", (name,))

    def rebuild(self, rows: Iterable[IndexedRow]) -> None:
        """Index these rows anew. Jobs of the former index that are none of theirs are stale from then on."""
        if self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'rows'").fetchone():
            self._db.execute(
                "INSERT OR IGNORE INTO stale SELECT job_id FROM rows WHERE state = ?", (RowState.ENQUEUED.value,)
            )
            self._db.execute("DROP TABLE rows")
        self._db.executescript(_SCHEMA)
        self._db.execute("BEGIN")
        for count, row in enumerate(rows, 1):
            self._insert(row)
            if count % _COMMIT_EVERY == 0:
                self._db.execute("COMMIT")
                self._db.execute("BEGIN")
        self._db.execute("DELETE FROM stale WHERE job_id IN (SELECT job_id FROM rows)")
        self._db.execute("COMMIT")

    def _insert(self, row: IndexedRow) -> None:
        error = row.error.model_dump_json() if row.error else None
        values = (row.number, row.offset, row.length, row.custom_id, row.job_id, int(row.chat))
        insert = "INSERT OR IGNORE INTO rows VALUES (?, ?, ?, ?, ?, ?, 0, ?, ?)"
        if self._db.execute(insert, (*values, None, error)).rowcount:
            return
        where = "custom_id = ? AND duplicate_of IS NULL"
        (first,) = self._db.execute(f"SELECT number FROM rows WHERE {where}", (row.custom_id,)).fetchone()
        duplicate = ErrorInfo(
            code="duplicate_custom_id",
            message=f"custom_id {row.custom_id!r} of line {row.number} is that of line {first} already",
            param="custom_id",
        )
        self._db.execute(insert, (*values, first, duplicate.model_dump_json()))

    def stale_jobs(self) -> Iterator[str]:
        """Jobs to be deleted: of rows that no longer are, that are to be run again, or that are in the output."""
        for (job_id,) in self._db.execute("SELECT job_id FROM stale"):
            yield str(job_id)

    def clear_stale(self) -> None:
        """Forget the stale jobs: they were deleted."""
        self._db.execute("DELETE FROM stale")

    def begin_matching(self) -> None:
        """Take every row for unfinished, until `match` has seen the output."""
        self._db.execute("CREATE TEMP TABLE enqueued (number INTEGER PRIMARY KEY)")
        self._db.execute("CREATE TEMP TABLE retried (number INTEGER PRIMARY KEY)")
        self._db.execute("BEGIN")
        self._db.execute("INSERT INTO enqueued SELECT number FROM rows WHERE state = 1")
        self._db.execute("UPDATE rows SET state = 0 WHERE state > 1")

    def match(self, custom_id: str, state: RowState, *, duplicate_at: int | None = None) -> int | None:
        """Record that the output has this row; return its line's number, None for an id that isn't in the input.

        `duplicate_at`: it is a later row of that name, then at this line. If the input has changed since, it is taken
        for the first such row that is not matched yet.
        """
        if duplicate_at is None:
            return self._match(state, "custom_id = ? AND duplicate_of IS NULL", custom_id)
        duplicate = "custom_id = ? AND duplicate_of IS NOT NULL AND state < 2"
        exact = self._match(state, f"{duplicate} AND number = ?", custom_id, duplicate_at)
        return exact or self._match(state, f"{duplicate} ORDER BY number LIMIT 1", custom_id)

    def _match(self, state: RowState, where: str, *values: str | int) -> int | None:
        query = f"UPDATE rows SET state = ? WHERE number = (SELECT number FROM rows WHERE {where}) RETURNING number"
        found = self._db.execute(query, (state.value, *values)).fetchone()
        return None if found is None else int(found[0])

    def retry(self, number: int) -> None:
        """Take a matched row back. Its job, which ended with an error, is stale: it is enqueued anew."""
        self._db.execute("INSERT INTO retried VALUES (?)", (number,))
        self._db.execute(
            "INSERT OR IGNORE INTO stale SELECT job_id FROM rows WHERE number = ? AND error IS NULL", (number,)
        )

    def end_matching(self) -> None:
        """Keep what `match` recorded. Jobs of rows that were written, but not yet deleted from Redis, are stale."""
        self._db.execute("UPDATE rows SET state = 0 WHERE number IN (SELECT number FROM retried)")
        self._db.execute(
            "INSERT OR IGNORE INTO stale SELECT job_id FROM rows JOIN enqueued USING (number) WHERE state > 1"
        )
        self._db.execute("COMMIT")
        self._db.execute("DROP TABLE enqueued")
        self._db.execute("DROP TABLE retried")

    def placement(self) -> Placement:
        """An empty record of whose lines stand where in the output."""
        return Placement(self._db)

    def job_id(self, number: int) -> str:
        """The id of a row's job."""
        return str(self._db.execute("SELECT job_id FROM rows WHERE number = ?", (number,)).fetchone()[0])

    def last_number(self, limit: int | None) -> int:
        """Line number of the last row of the first `limit` rows."""
        if limit is not None:
            found = self._db.execute(
                "SELECT number FROM rows ORDER BY number LIMIT 1 OFFSET ?", (limit - 1,)
            ).fetchone()
            if found is not None:
                return int(found[0])
        return int(self._db.execute("SELECT coalesce(max(number), 0) FROM rows").fetchone()[0])

    def counts(self, last: int) -> Counts:
        """Counts over the rows up to line `last`."""
        query = "SELECT state, count(*) FROM rows WHERE number <= ? GROUP BY state"
        by_state = dict(self._db.execute(query, (last,)).fetchall())
        return Counts(sum(by_state.values()), by_state.get(RowState.DONE, 0), by_state.get(RowState.ERROR, 0))

    def first_unfinished(self, after: int, last: int) -> int | None:
        """Line number of the first row without output from line `after` up to line `last`."""
        query = "SELECT number FROM rows WHERE number >= ? AND number <= ? AND state < 2 ORDER BY number LIMIT 1"
        found = self._db.execute(query, (after, last)).fetchone()
        return None if found is None else int(found[0])

    def unfinished(self, after: int, last: int, limit: int) -> list[IndexedRow]:
        """Rows without output, after line `after` and up to line `last`, at most `limit` of them, in order."""
        query = f"{_SELECT} WHERE number > ? AND number <= ? AND state < 2 ORDER BY number LIMIT ?"
        return [_row(values) for values in self._db.execute(query, (after, last, limit))]

    def refused(self, last: int, limit: int, *, duplicates: bool) -> list[IndexedRow]:
        """Rows up to line `last` that cannot be run: duplicates, or those that are wrong in themselves."""
        kind = "duplicate_of IS NOT NULL" if duplicates else "duplicate_of IS NULL"
        query = f"{_SELECT} WHERE error IS NOT NULL AND {kind} AND number <= ? ORDER BY number LIMIT ?"
        return [_row(values) for values in self._db.execute(query, (last, limit))]

    def record(self, rows: Iterable[tuple[int, RowState]]) -> None:
        """Set the states of rows, given by line number."""
        self._db.execute("BEGIN")
        self._db.executemany(
            "UPDATE rows SET state = ? WHERE number = ?", ((state.value, number) for number, state in rows)
        )
        self._db.execute("COMMIT")


_SELECT = "SELECT number, offset, length, custom_id, job_id, chat, duplicate_of, error FROM rows"


def _row(values: tuple[int, int, int, str, str, int, int | None, str | None]) -> IndexedRow:
    number, offset, length, custom_id, job_id, chat, duplicate_of, error = values
    info = ErrorInfo.model_validate_json(error) if error else None
    return IndexedRow(number, offset, length, custom_id, job_id, bool(chat), duplicate_of, info)
