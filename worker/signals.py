"""Requests to stop, as something that can be selected on: SIGINT and SIGTERM are counted and nothing more."""

from __future__ import annotations

import select
import signal
from types import FrameType, TracebackType
from typing import Any

from batonq.worker.waker import Waker


class StopRequests:
    """Counts SIGINT and SIGTERM while it is entered. `fileno()` becomes readable with each, until `clear`.

    One request: wind up in order. Two: at once.
    """

    def __init__(self) -> None:
        self.count = 0
        self._waker = Waker()
        self._previous: dict[signal.Signals, Any] = {}

    def fileno(self) -> int:
        """For select."""
        return self._waker.fileno()

    def clear(self) -> None:
        """Take note of what has come so far."""
        self._waker.clear()

    def wait(self, seconds: float) -> None:
        """Sleep, or less if a request comes."""
        self.clear()
        select.select([self], [], [], seconds)

    def request(self) -> None:
        """Ask to stop, as a signal does."""
        self.count += 1
        self._waker.wake()

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        self.request()

    def __enter__(self) -> StopRequests:
        for request in (signal.SIGINT, signal.SIGTERM):
            self._previous[request] = signal.signal(request, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for request, handler in self._previous.items():
            signal.signal(request, handler)
        self._waker.close()
