"""Reads what a job writes while it runs: chunks of text with their token ids, from any offset, until the end.

Each context of a streaming job has a Redis stream (`keys.stream`). An entry's id is `{tokens up to its end}-0`; the
last one, `{tokens}-1`, says why it ended. So an offset is a place to go on from, and no chunk is read twice.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import redis

from batonq.producer import keys
from batonq.producer.errors import JobFailedError, ResultTimeoutError, StreamTrimmedError
from batonq.producer.schema import ErrorInfo, FinishReason

#: One blocking read, in seconds; shorter than any sensible socket timeout.
_BLOCK_SECONDS = 1.0
#: Entries of each context that one read takes at most.
_COUNT = 256


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """What one output of a job has grown by. The texts of an output's chunks, put together, are its final text."""

    #: Which of the job's `n` outputs.
    index: int
    #: May be empty: an incomplete character, or what may become a stop string, is held back.
    text: str
    token_ids: list[int]
    #: Tokens of this output up to here: where to go on from.
    offset: int
    #: Set in the last chunk of an output.
    finish_reason: FinishReason | None = None
    #: Packed log probabilities of the tokens, if asked for (docs/protocol.md).
    logprobs: bytes = b""


class StreamReader:
    """Follows the streams of one job's outputs. `starts` are the offsets to begin after, one for each output."""

    def __init__(self, connection: redis.Redis, job_id: str, starts: list[int]) -> None:
        self._connection = connection
        self._job_id = job_id
        names = keys.context_ids(job_id, len(starts))
        #: The outputs that haven't ended: stream key → index, and the id of the last entry that was read.
        self._open = {keys.stream(name): index for index, name in enumerate(names)}
        self._seen = {keys.stream(name): f"{start}-0" for name, start in zip(names, starts, strict=True)}
        self._offsets = list(starts)

    def chunks(self, failure: Callable[[], ErrorInfo | None], timeout: float | None) -> Iterator[StreamChunk]:
        """Chunks as they come; `timeout` in seconds bounds the wait for each.

        `failure` is asked about a job that gives nothing: what is wrong with it, or None while it may still give
        something. Raises JobFailedError, StreamTrimmedError, ResultTimeoutError, and what `failure` does.
        """
        due = None if timeout is None else time.monotonic() + timeout
        while self._open:
            left = _BLOCK_SECONDS if due is None else min(_BLOCK_SECONDS, due - time.monotonic())
            chunks = self._read(left)
            yield from chunks
            if chunks:
                due = None if timeout is None else time.monotonic() + timeout
            elif (error := failure()) is not None:
                while chunks := self._read(0):  # what it wrote before it failed
                    yield from chunks
                if self._open:
                    raise JobFailedError(self._job_id, error)
            elif due is not None and time.monotonic() >= due:
                raise ResultTimeoutError(self._job_id, timeout or 0.0)

    def _read(self, seconds: float) -> list[StreamChunk]:
        """What is there, after waiting so long for it to come."""
        wanted: Any = {key: self._seen[key] for key in self._open}
        block = max(1, int(seconds * 1000)) if seconds > 0 else None
        reply: Any = self._connection.xread(wanted, count=_COUNT, block=block)
        chunks = []
        for name, entries in reply or ():
            key = name.decode()
            for entry_id, fields in entries:
                self._seen[key] = entry_id
                chunks.append(self._chunk(key, self._open[key], int(entry_id.split(b"-")[0]), fields))
        return chunks

    def _chunk(self, key: str, index: int, end: int, fields: dict[bytes, bytes]) -> StreamChunk:
        if b"error" in fields:
            error = ErrorInfo(code=fields[b"error"].decode(), message=fields[b"message"].decode())
            raise JobFailedError(self._job_id, error)
        packed = fields.get(b"token_ids", b"")
        token_ids = list(struct.unpack(f"<{len(packed) // 4}I", packed))
        if end - len(token_ids) > self._offsets[index]:
            raise StreamTrimmedError(key, self._offsets[index], end - len(token_ids))
        self._offsets[index] = end
        reason = fields.get(b"finish_reason")
        if reason is not None:
            del self._open[key]
        finish: Any = reason.decode() if reason is not None else None
        return StreamChunk(index, fields[b"text"].decode(), token_ids, end, finish, fields.get(b"logprobs", b""))
