"""Which contexts are in the step that an engine's process computes right now, in memory that outlives the process.

The child marks each step before it computes it and wipes the mark afterwards; when it has died, the parent reads who
was in the step. So a death between two steps, or while the engine was loading, is no context's fault.
"""

from __future__ import annotations

import mmap
import os
import struct

_COUNT = struct.Struct("<I")
#: Contexts that fit; a step of more of them shows the first.
_ROOM = 1 << 14


class StepMarker:
    """Shared memory behind a file descriptor, which may be passed on to a child; without one it is made."""

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("batonq-step")
            os.truncate(fd, _COUNT.size * (1 + _ROOM))
        self.fd = fd
        self._memory = mmap.mmap(fd, _COUNT.size * (1 + _ROOM))

    def begin(self, numbers: bytes) -> None:
        """Mark a step of the contexts with these numbers (`messages.pack_ids`)."""
        numbers = numbers[: _COUNT.size * _ROOM]
        self._memory[_COUNT.size : _COUNT.size + len(numbers)] = numbers
        _COUNT.pack_into(self._memory, 0, len(numbers) // _COUNT.size)  # last: until now nobody was in a step

    def end(self) -> None:
        """No step is computed any more."""
        _COUNT.pack_into(self._memory, 0, 0)

    def read(self) -> bytes:
        """Numbers of the contexts of the step that is computed now; empty between steps."""
        (count,) = _COUNT.unpack_from(self._memory)
        return self._memory[_COUNT.size : _COUNT.size * (1 + count)]

    def close(self) -> None:
        """Give the memory back; no other method may be called afterwards."""
        self._memory.close()
        os.close(self.fd)
