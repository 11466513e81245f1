"""The output of a run, one row per input row in the form of OpenAI's batch output: how it is written and read again.

The file is the truth about what is finished. A row counts once its line is complete, so a line that a crash cut off is
dropped when the file is opened again, and its row is written anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from batonq.producer.errors import StateError
from batonq.producer.index import IndexedRow
from batonq.producer.openai import completion
from batonq.producer.schema import ErrorInfo, Result

#: Code of the error of a row whose custom_id an earlier row has.
DUPLICATE = "duplicate_custom_id"

_LINE_START = b'{"id": "batch_req_'


class FinishedRow(NamedTuple):
    """What a line of the output says about its row."""

    custom_id: str
    error_code: str | None
    #: For the error row of a custom_id that was used before: its line in the input.
    duplicate_at: int | None
    line: bytes


def result_line(row: IndexedRow, result: Result) -> bytes:
    """The output line of a row whose job has ended."""
    if result.error is not None:
        return error_line(row, result.error)
    body = completion(result, row.request_id, chat=row.chat)
    return _line(row, response={"status_code": 200, "request_id": row.request_id, "body": body}, error=None)


def error_line(row: IndexedRow, error: ErrorInfo) -> bytes:
    """The output line of a row that has no output, and why."""
    return _line(row, response=None, error=error.model_dump() | {"line": row.number})


def _line(row: IndexedRow, *, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    fields = {"id": f"batch_req_{row.request_id}", "custom_id": row.custom_id, "response": response, "error": error}
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


class OutputFile:
    """An output file to append to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def write(self, lines: Iterable[bytes]) -> None:
        """Append lines and hand them to the kernel. Raises StateError, the file as it was, if the disk refuses."""
        data = memoryview(b"".join(lines))
        size = os.fstat(self._fd).st_size
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            os.ftruncate(self._fd, size)
            raise StateError("output_not_written", f"{self.path}: {error.strerror}", path=str(self.path)) from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def mend(path: Path, keep: Callable[[FinishedRow], bool], *, rewrite: bool) -> None:
    """Show every row of an output file to `keep`, then take a torn tail off and, with `rewrite`, what is not kept.

    Raises StateError for a file with anything else in it, and changes nothing then.
    """
    if not path.exists():
        return
    kept = path.with_name(path.name + ".rewrite")
    complete = 0
    try:
        with path.open("rb") as source, (kept if rewrite else Path(os.devnull)).open("wb") as rewritten:
            for number, line in enumerate(source, 1):
                if not line.endswith(b"\n"):
                    if not line.startswith(_LINE_START[: len(line)]):
                        raise _foreign(path, number)
                    break
                complete += len(line)
                if keep(_read_line(path, number, line)):
                    rewritten.write(line)
        if rewrite:
            kept.replace(path)
        else:
            os.truncate(path, complete)
    finally:
        kept.unlink(missing_ok=True)


def _read_line(path: Path, number: int, line: bytes) -> FinishedRow:
    try:
        fields = json.loads(line)
        custom_id, response, error = fields["custom_id"], fields["response"], fields["error"]
        status = response["status_code"] if error is None else 0
        duplicate_at = int(error["line"]) if error is not None and error["code"] == DUPLICATE else None
        code = error["code"] if error is not None else (None if status < 400 else "error")
    except (ValueError, KeyError, TypeError):
        raise _foreign(path, number) from None
    return FinishedRow(custom_id, code, duplicate_at, line)


def _foreign(path: Path, number: int) -> StateError:
    message = f"{path}, line {number}, is no output row; name another output, or --overwrite to lose what is there"
    return StateError("foreign_output", message, path=str(path), line=number)
