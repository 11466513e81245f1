"""Ctrl-C and SIGTERM of a run: the first asks it to come to an end that can be resumed, the second ends it at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType

#: Exit code of a run that was interrupted, whether by Ctrl-C or by SIGTERM.
EXIT_CODE = 130

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Context manager that handles both signals while it is entered. `requested` says that one came."""

    def __init__(self, last_words: str) -> None:
        """`last_words` are said when the second one ends the process."""
        self.requested = False
        self._last_words = last_words
        #: Ends what must not outlive us; called from the signal handler, so it must be brief.
        self.kill: Callable[[], None] | None = None
        self._former: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Interrupt:
        self._former = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
            os.write(sys.stderr.fileno(), b"\nbatonq: stopping; once more to stop at once\n")
            return
        # Nothing is unwound: the output's tail and the index are mended by the next run.
        if self.kill is not None:
            self.kill()
        os.write(sys.stderr.fileno(), f"\nbatonq: {self._last_words}\n".encode())
        os._exit(EXIT_CODE)
