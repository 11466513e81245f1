"""Something that select sees, set by a thread or a signal handler for a loop that sleeps."""

from __future__ import annotations

import socket
from contextlib import suppress


class Waker:
    """Readable from `wake` until `clear`. Both return at once, whatever is going on."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """For select."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Make it readable."""
        with suppress(BlockingIOError):  # then it is readable already
            self._writer.send(b"!")

    def clear(self) -> None:
        """Forget past wakes."""
        with suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        """Neither end may be used afterwards."""
        self._reader.close()
        self._writer.close()
