"""From the lines of a JSONL file to jobs: OpenAI batch lines, and plain rows with flat parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, BinaryIO, NamedTuple

from pydantic import ValidationError

from batonq.producer import serializer
from batonq.producer.errors import RowError
from batonq.producer.schema import ErrorInfo, PromptJob, error_from_flat, job_from_flat

#: Longest line that is read, in bytes, its end excluded.
MAX_LINE_BYTES = 10_000_000

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

_BOM = b"\xef\xbb\xbf"
_SKIP_BYTES = 1 << 20

#: Fields of a job that a row doesn't set: the run does, or they stand flat in the row.
_RUN_FIELDS = frozenset({"id", "custom_id", "client_id", "schema_version", "sampling"})

#: Parameters that are not carried out, with the value that asks for nothing: such a value is accepted.
_NO_EFFECT: dict[str, Any] = {"best_of": 1, "stream": False, "tools": []}

#: Names the end user to the operator of an API; nothing here depends on it.
_IGNORED = "user"


class Line(NamedTuple):
    """A line that is not blank: its number from 1, where it lies in bytes, and its bytes unless it is too long."""

    number: int
    offset: int
    length: int
    data: bytes


@dataclass(frozen=True)
class Row:
    """What a line asks for: `job`, or the `error` that says why it can't be run."""

    number: int
    custom_id: str
    job: PromptJob | None = None
    error: ErrorInfo | None = None

    @property
    def chat(self) -> bool:
        """Whether its result is a chat completion, not a text completion."""
        return self.job is not None and self.job.messages is not None


def read_lines(file: BinaryIO, limit: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """The lines of a file that are not blank, from its start. One that is longer than `limit` comes without data."""
    number = offset = 0
    while chunk := file.readline(limit + 1):
        number += 1
        start, length = offset, len(chunk)
        too_long = length > limit and not chunk.endswith(b"\n")
        while too_long and not chunk.endswith(b"\n") and (chunk := file.readline(_SKIP_BYTES)):
            length += len(chunk)
        offset += length
        if too_long:
            yield Line(number, start, length, b"")
            continue
        if number == 1 and chunk.startswith(_BOM):
            chunk, start, length = chunk[len(_BOM) :], start + len(_BOM), length - len(_BOM)
        if chunk.strip():
            yield Line(number, start, length, chunk)


def parse_row(line: Line, limit: int = MAX_LINE_BYTES) -> Row:
    """Make of a line what can be made of it; never raises for what is in the line."""
    custom_id = f"line-{line.number}"
    try:
        if not line.data:
            message = f"the line has {line.length} bytes, the limit is {limit}"
            raise RowError("line_too_long", message, size=line.length, limit=limit)
        fields = _read_object(line.data)
        custom_id = _custom_id(fields, custom_id)
        return Row(line.number, custom_id, job=_make_job(fields))
    except RowError as error:
        info = error.info()
    except RecursionError:
        info = ErrorInfo(code="invalid_json", message="nested too deeply")
    return Row(line.number, custom_id, error=ErrorInfo.model_validate({k: _clean(v) for k, v in info}))


def job_id(run_id: str, row: Row) -> str:
    """The id of a row's job: the run's, and a digest of line and content that is the same in every run."""
    digest = blake2b(f"{row.number} {row.custom_id} ".encode(), digest_size=16)
    if row.job is not None:
        digest.update(serializer.dumps(row.job.to_kwargs()))
    return f"{run_id}-{digest.hexdigest()}"


def _read_object(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data.decode(), parse_constant=_refuse_constant)
    except ValueError as error:
        raise RowError("invalid_json", f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RowError("invalid_json", f"not a JSON object but {type(fields).__name__}")
    return fields


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _custom_id(fields: dict[str, Any], default: str) -> str:
    value = fields.pop("custom_id", None)
    if value is None:
        return default
    if not isinstance(value, str) or not value or _clean(value) != value:
        message = f"custom_id: must be text of at least one character, not {value!r}"
        raise RowError("invalid_parameter", message, param="custom_id")
    return value


def _make_job(fields: dict[str, Any]) -> PromptJob:
    batch_line = fields.keys() & {"method", "url", "body"}
    fields = _batch_body(fields) if batch_line else fields
    for name in fields:
        if name in _RUN_FIELDS or _clean(name) != name:
            raise RowError("unknown_parameter", f"there is no parameter {name} in a row", param=name)
    try:
        job = job_from_flat(_normalized(fields))
        serializer.dumps(job.to_kwargs())
    except ValidationError as error:
        info = error_from_flat(error)
        raise RowError(info.code, info.message, param=info.param) from None
    except (ValueError, OverflowError) as error:
        # Lone surrogates, and in metadata integers beyond 64 bits or deep nesting: JSON, but nothing that can be sent.
        raise RowError("invalid_parameter", f"the row holds a value that cannot be sent: {error}") from None
    return job


def _batch_body(fields: dict[str, Any]) -> dict[str, Any]:
    """The body of an OpenAI batch line, its envelope checked."""
    if fields.get("method") != "POST":
        found = repr(fields["method"]) if "method" in fields else "none"
        raise RowError("invalid_parameter", f"method: must be POST, there is {found}", param="method")
    url = fields.get("url")
    if url not in (CHAT_URL, COMPLETIONS_URL):
        message = f"url: must be {CHAT_URL} or {COMPLETIONS_URL}, not {url!r}"
        raise RowError("invalid_parameter", message, param="url")
    body = fields.get("body")
    if not isinstance(body, dict):
        raise RowError("invalid_parameter", "body: must be an object", param="body")
    for name in fields.keys() - {"method", "url", "body"}:
        raise RowError("unknown_parameter", f"there is no parameter {name} in a batch line", param=name)
    needed, foreign = ("messages", "prompt") if url == CHAT_URL else ("prompt", "messages")
    if body.get(needed) is None or body.get(foreign) is not None:
        raise RowError("invalid_parameter", f"{needed}: {url} needs {needed}, and no {foreign}", param=needed)
    return body


def _normalized(fields: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's other spellings in ours; parameters that ask for nothing left out."""
    kept = {
        name: value
        for name, value in fields.items()
        if value is not None and name != _IGNORED and not (name in _NO_EFFECT and value == _NO_EFFECT[name])
    }
    if "stream" in kept:
        raise RowError("unsupported_parameter", "stream: the rows of a file are not streamed", param="stream")
    if "max_completion_tokens" in kept:
        limit = kept.pop("max_completion_tokens")
        if kept.setdefault("max_tokens", limit) != limit:
            message = f"max_completion_tokens: {limit!r} contradicts max_tokens {kept['max_tokens']!r}"
            raise RowError("invalid_parameter", message, param="max_completion_tokens")
    prompt = kept.get("prompt")
    if isinstance(prompt, list):
        # OpenAI's prompt may be token ids, or a list of prompts.
        if prompt and all(type(item) is int for item in prompt):
            kept["token_ids"] = kept.pop("prompt")
        elif len(prompt) == 1 and isinstance(prompt[0], str):
            kept["prompt"] = prompt[0]
        else:
            message = "prompt: more than one prompt in a row is not supported"
            raise RowError("unsupported_parameter", message, param="prompt")
    return kept


def _clean(text: str | None) -> str | None:
    """Text that UTF-8 can hold: lone surrogates, which JSON can spell, are escaped."""
    return None if text is None else text.encode(errors="backslashreplace").decode()
