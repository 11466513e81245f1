"""From token ids to text: a pure function of the ids, never of how they were batched or where they were cut.

Works on bytes, through a table token id → bytes. A character is shown once all its bytes are there; stop strings are
looked for in the bytes as tokens come, so an output ends at the first place where a stop string is complete, wherever
token borders fall, and text that may turn out to be the start of one is held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What text needs to know of a tokenizer: the bytes of each token, and which tokens show nothing."""

    token_bytes: Sequence[bytes]
    special_token_ids: frozenset[int]
    #: Whether a prompt's tokens begin with a space that its text doesn't have (SentencePiece's dummy prefix).
    strip_leading_space: bool = False

    def bytes_of(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """The bytes that a token adds to the text; with `skip_special`, none for a special token."""
        return b"" if skip_special and token_id in self.special_token_ids else self.token_bytes[token_id]


class TextState:
    """The text of one output as it grows, token by token.

    `push` returns True when a stop string is complete; the output then ends before it, or with it if `include_stop`.
    `skip_special` shows nothing of special tokens. An `echo` is the prompt that the text begins with; stop strings are
    looked for behind it. Rebuilt on a resume by pushing the same tokens again.
    """

    __slots__ = (
        "_buffer",
        "_decoder",
        "_echoed",
        "_emitted",
        "_include_stop",
        "_longest_stop",
        "_skip_special",
        "_stops",
        "_vocabulary",
        "stopped",
    )

    def __init__(
        self,
        vocabulary: Vocabulary,
        stops: Iterable[str] = (),
        *,
        include_stop: bool = False,
        skip_special: bool = True,
        echo: Iterable[int] = (),
    ) -> None:
        self._vocabulary = vocabulary
        self._include_stop = include_stop
        self._skip_special = skip_special
        self._stops = tuple(stop.encode() for stop in stops)
        self._longest_stop = max((len(stop) for stop in self._stops), default=0)
        self._buffer = bytearray(b"".join(map(self._bytes_of, echo)))
        if vocabulary.strip_leading_space and self._buffer.startswith(b" "):
            del self._buffer[0]
        self._echoed = len(self._buffer)
        self._emitted = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.stopped = False

    def _bytes_of(self, token_id: int) -> bytes:
        return self._vocabulary.bytes_of(token_id, skip_special=self._skip_special)

    def push(self, token_id: int, *, may_stop: bool = True) -> bool:
        """Add one output token; True if a stop string is now complete (never, unless `may_stop`)."""
        assert not self.stopped, "no token comes after a stop string"
        before = len(self._buffer)
        self._buffer += self._bytes_of(token_id)
        if self._stops and may_stop and (found := self._first_completed_stop(before)) is not None:
            end, start = found
            del self._buffer[end if self._include_stop else start :]
            self.stopped = True
        return self.stopped

    def _first_completed_stop(self, before: int) -> tuple[int, int] | None:
        """End and start of the stop string that is complete first, of those that end after byte `before`."""
        found = [
            (at + len(stop), at)
            for stop in self._stops
            if (at := self._buffer.find(stop, max(self._echoed, before - len(stop) + 1))) >= 0
        ]
        # Complete first, as if bytes came one at a time: so where token borders fall can't matter.
        return min(found, default=None)

    def delta(self, *, final: bool) -> str:
        """Text since the last call. Unless final, incomplete characters and possible starts of a stop are kept back."""
        visible = len(self._buffer) if final or self.stopped else len(self._buffer) - self._held_back()
        piece = bytes(self._buffer[self._emitted : max(visible, self._emitted)])
        self._emitted += len(piece)
        return self._decoder.decode(piece, final=final)

    def _held_back(self) -> int:
        """Length of the longest tail of the buffer that is the beginning of a stop string."""
        for length in range(min(self._longest_stop - 1, len(self._buffer) - self._echoed), 0, -1):
            tail = bytes(self._buffer[-length:])
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0

    @property
    def value(self) -> str:
        """The whole text so far; bytes that are no valid UTF-8 become U+FFFD."""
        return self._buffer.decode("utf-8", "replace")
