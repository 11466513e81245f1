"""What parent and child say to each other: small typed messages, length-prefixed msgpack over a socket pair.

The parent numbers what it adds, and no number is used twice for one child. Everything about a context carries the
number of the `Add` it belongs to, so that late output of an ownership that was lost is recognised and dropped.

What the child says piles up in the socket until the parent looks. A bell, a pipe beside the socket, wakes it for what
can't wait, and for each commit.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, get_args

import msgpack

_LENGTH = struct.Struct("<I")
#: Bytes that are read at once.
_READ_SIZE = 1 << 16


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """Inverse of `pack_ids`; struct.error if it can't be that."""
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


@dataclass(frozen=True, slots=True)
class Load:
    """Parent → child, first: which engine to build, and how often the parent commits.

    `engine` is the module that builds it.
    """

    engine: str
    options: dict[str, Any]
    #: Seconds between commits.
    commit_interval: float


@dataclass(frozen=True, slots=True)
class Ready:
    """Child → parent: the engine is built; what it can take."""

    model_directory: str
    max_model_len: int
    kv_cache_tokens: int
    vocab_size: int
    max_num_seqs: int
    numerics_id: str
    weights_id: str


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Child → parent: the engine can't be built; starting again would not help."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Add:
    """Parent → child: run a context, from its input or on from its outputs."""

    number: int
    context_id: str
    input_token_ids: bytes
    output_token_ids: bytes
    #: Packed log probabilities of the output tokens, if the parameters ask for them.
    output_logprobs: bytes
    #: `SamplingParams`, effective.
    sampling: dict[str, Any]
    priority: int
    #: Whether updates carry text as it becomes visible.
    streaming: bool
    #: Whether steps hold it alone, with its job's other contexts, until one of them has a new token.
    alone: bool


@dataclass(frozen=True, slots=True)
class Abort:
    """Parent → child: end a context, silently."""

    number: int
    context_id: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Parent → child: no further step until `Resume`."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Parent → child: step again."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Parent → child: finish the step, say the last, exit."""


class Update(NamedTuple):
    """What a step did to one context. What stands below the finish reason comes with it."""

    number: int
    #: The context's state after the step.
    state: str
    new_token_ids: bytes = b""
    #: Packed log probabilities of the new tokens, if asked for.
    new_logprobs: bytes = b""
    #: Text that became visible with the new tokens, if streaming.
    new_text: str = ""
    finish_reason: str | None = None
    text: str | None = None
    #: Text that was held back until it was clear that nothing follows, if streaming.
    last_text: str = ""
    cached_tokens: int = 0
    #: `producer.schema.TokenLogprob`s of the output, and of the prompt (None for its first token), if asked for.
    logprobs: list[dict[str, Any] | None] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    error_code: str | None = None
    error_message: str | None = None
    error_param: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Child → parent: one step was done."""

    step: int
    #: Unix time of its end.
    ended_at: float
    #: Contexts that run and of which nothing but tokens is new, and these tokens: a number for each (`pack_ids`).
    numbers: bytes
    token_ids: bytes
    #: All others of which something is new, as the fields of their `Update`s.
    updates: Sequence[Sequence[Any]]
    #: Whether it is time to commit what was said so far.
    due: bool = False


Message = Load | Ready | LoadFailed | Add | Abort | Pause | Resume | Stop | Step

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}
_FIELDS = {kind: [field.name for field in fields(kind)] for kind in _KINDS.values()}


class Channel:
    """One end of the socket pair. Both ends may send at once: while one waits to send, it takes in what comes.

    `bell` is the file descriptor of the pipe's end to write to, where this end has to wake the other one. `patience`:
    seconds for which the other side may take nothing before TimeoutError tells so.
    """

    def __init__(self, connection: socket.socket, bell: int | None = None, patience: float | None = None) -> None:
        self._patience = patience
        self._socket = connection
        self._socket.setblocking(False)
        self._bell = bell
        if bell is not None:
            os.set_blocking(bell, False)
        self._received = bytearray()
        #: Whether the other side is gone and everything that it sent has been received.
        self.closed = False

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def send(self, message: Message, *, ring: bool = True) -> None:
        """Send, waiting while the other side is behind: that is the back-pressure. Once it is gone, do nothing.

        Without `ring`, the other side may look later. Raises TimeoutError where there is a `patience`.
        """
        kind = type(message)
        values = [getattr(message, name) for name in _FIELDS[kind]]
        payload = msgpack.packb([kind.__name__, *values], use_bin_type=True)
        rest = memoryview(_LENGTH.pack(len(payload)) + payload)
        while rest and not self.closed:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                self._ring()  # the socket is full, and it has to look now
                readable, writable, _ = select.select([self], [self], [], self._patience)
                if readable:
                    self._take_in()
                elif not writable:
                    raise TimeoutError(f"the other side has taken nothing for {self._patience:g} s") from None
            except (BrokenPipeError, ConnectionResetError):
                return  # what it sent before is still to be received, and then end of file
        if ring:
            self._ring()

    def _ring(self) -> None:
        if self._bell is None:
            return
        with suppress(BlockingIOError, BrokenPipeError):  # rung often enough, or nobody is there
            os.write(self._bell, b"!")

    def receive(self, *, wait: bool) -> list[Message]:
        """Messages that are there; with `wait`, at least one, unless the other side is gone."""
        messages = list(self._decode())
        more = True
        while not self.closed and (more or (wait and not messages)):
            if wait and not messages:
                select.select([self], [], [])
            more = self._take_in()
            messages += self._decode()
        return messages

    def _take_in(self) -> bool:
        """Whether there may be more."""
        try:
            data = self._socket.recv(_READ_SIZE)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data = b""
        self._received += data
        self.closed = not data
        return len(data) == _READ_SIZE

    def _decode(self) -> Iterator[Message]:
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            end = _LENGTH.size + length
            if len(self._received) < end:
                return
            kind, *values = msgpack.unpackb(bytes(self._received[_LENGTH.size : end]), raw=False)
            del self._received[:end]
            yield _KINDS[kind](*values)

    def close(self) -> None:
        """Close this end; the other reads end of file."""
        self.closed = True
        self._socket.close()
