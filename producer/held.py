"""Lines of the output whose turn has not come: `--order` keeps them in the index's file until it has."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

_SCHEMA = """
CREATE TABLE IF NOT EXISTS held (
    number INTEGER PRIMARY KEY,      -- of the row's line in the input
    job_id TEXT NOT NULL,            -- tells whether the row is still what it was
    error INTEGER NOT NULL,          -- whether the line is an error row
    line BLOB NOT NULL
)
"""


class HeldLine(NamedTuple):
    """A line of the output, with its end, and the row it belongs to."""

    number: int
    job_id: str
    error: bool
    line: bytes


class HeldLines:
    """The held lines in an index's database. They are as safe there as lines of the output are."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        db.execute(_SCHEMA)

    def put(self, lines: Iterable[HeldLine]) -> None:
        """Keep these lines; they are on disk together or not at all."""
        self._db.execute("BEGIN")
        self._db.executemany("INSERT OR REPLACE INTO held VALUES (?, ?, ?, ?)", lines)
        self._db.execute("COMMIT")

    def before(self, number: int, limit: int) -> list[HeldLine]:
        """The first held lines of rows before line `number` of the input, at most `limit`, in order."""
        query = "SELECT number, job_id, error, line FROM held WHERE number < ? ORDER BY number LIMIT ?"
        return [
            HeldLine(n, job_id, bool(error), line)
            for n, job_id, error, line in self._db.execute(query, (number, limit))
        ]

    def drop(self, upto: int) -> None:
        """Forget the lines of rows up to line `upto` of the input: they are in the output."""
        self._db.execute("DELETE FROM held WHERE number <= ?", (upto,))

    def match(self, *, retry_errors: int | None) -> None:
        """Within the index's matching: drop what is in the output, or of no row; take the rest for finished.

        `retry_errors`: error rows up to this line are to be run again.
        """
        self._db.execute(
            "DELETE FROM held WHERE job_id IS NOT"
            " (SELECT job_id FROM rows WHERE rows.number = held.number AND rows.state < 2)"
        )
        if retry_errors is not None:
            again = "FROM held WHERE error AND number <= ?"
            self._db.execute(f"INSERT OR IGNORE INTO stale SELECT job_id {again}", (retry_errors,))
            self._db.execute(f"DELETE {again}", (retry_errors,))
        self._db.execute(
            "UPDATE rows SET state = 2 + (SELECT error FROM held WHERE held.number = rows.number)"
            " WHERE number IN (SELECT number FROM held)"
        )


class Placement:
    """Which rows the lines of the output files belong to, to find those that stand there before their turn."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        db.execute("DROP TABLE IF EXISTS temp.placed")
        db.execute(
            "CREATE TEMP TABLE placed (file INTEGER, position INTEGER, number INTEGER, PRIMARY KEY (file, position))"
        )

    def add(self, file: int, position: int, number: int) -> None:
        """The line at this position of a file is that of row `number`."""
        self._db.execute("INSERT INTO placed VALUES (?, ?, ?)", (file, position, number))

    def number(self, file: int, position: int) -> int | None:
        """Whose line it is; None for a row that isn't in the input."""
        query = "SELECT number FROM placed WHERE file = ? AND position = ?"
        found = self._db.execute(query, (file, position)).fetchone()
        return None if found is None else int(found[0])

    def first_early(self, file: int, turn: int) -> int | None:
        """First position from which on the file is not in order, or has rows that are not before row `turn`."""
        query = "SELECT position, number FROM placed WHERE file = ? ORDER BY "
        found = self._db.execute(query + "position", (file,))
        in_order = self._db.execute(query + "number", (file,))
        for (position, number), (_, expected) in zip(found, in_order, strict=True):
            if number != expected or number >= turn:
                return int(position)
        return None
