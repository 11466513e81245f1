"""What parent and child say to each other: small typed messages, length-prefixed msgpack over a socket pair.

Everything about a context carries the execution id of the claim it belongs to, so that late output of an ownership that
was lost is recognised and dropped.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgpack

_LENGTH = struct.Struct("<I")


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_ids(packed: bytes) -> list[int]:
    """Inverse of `pack_ids`."""
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


@dataclass(frozen=True, slots=True)
class Load:
    """Parent → child, first: which engine to build. `engine` is the module that builds it."""

    engine: str
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ready:
    """Child → parent: the engine is built; what it can take."""

    model_directory: str
    max_model_len: int
    kv_cache_tokens: int
    vocab_size: int
    max_num_seqs: int
    numerics_id: str


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Child → parent: the engine can't be built; starting again would not help."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Add:
    """Parent → child: run a context, from its input or on from its outputs."""

    execution_id: str
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


@dataclass(frozen=True, slots=True)
class Abort:
    """Parent → child: end a context, silently."""

    execution_id: str
    context_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Parent → child: finish the step, say the last, exit."""


@dataclass(frozen=True, slots=True)
class Update:
    """Child → parent: what a step did to one context. What stands below the finish reason comes with it."""

    execution_id: str
    context_id: str
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
    """Child → parent: one step was done. `updates` are `Update`s as lists of their fields."""

    step: int
    updates: list[list[Any]]


Message = Load | Ready | LoadFailed | Add | Abort | Stop | Step

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (Load, Ready, LoadFailed, Add, Abort, Stop, Step)}


def to_list(message: Any) -> list[Any]:
    """The fields of a message, in order."""
    return [getattr(message, f.name) for f in fields(message)]


class Channel:
    """One end of the socket pair. Both ends may send at once: while one waits to send, it takes in what comes."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._received = bytearray()
        #: Whether the other side is gone and everything that it sent has been received.
        self.closed = False

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send, waiting while the other side is behind: that is the back-pressure. Once it is gone, do nothing."""
        payload = msgpack.packb([type(message).__name__, *to_list(message)], use_bin_type=True)
        rest = memoryview(_LENGTH.pack(len(payload)) + payload)
        while rest and not self.closed:
            readable, writable, _ = select.select([self], [self], [])
            try:
                if writable:
                    rest = rest[self._socket.send(rest) :]
                elif readable:
                    self._take_in()
            except (BrokenPipeError, ConnectionResetError):
                return  # what it sent before is still to be received, and then end of file

    def receive(self, *, wait: bool) -> list[Message]:
        """Messages that are there; with `wait`, at least one, unless the other side is gone."""
        messages = list(self._decode())
        while not self.closed:
            timeout = None if wait and not messages else 0
            if not select.select([self], [], [], timeout)[0]:
                break
            self._take_in()
            messages += self._decode()
        return messages

    def _take_in(self) -> None:
        try:
            data = self._socket.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        if data:
            self._received += data
        else:
            self.closed = True

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
