"""A real server for tests, in a directory of its own, and a helper that waits for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from batonq.producer.embedded import EmbeddedServer

_T = TypeVar("_T")


@contextmanager
def server(directory: Path) -> Iterator[EmbeddedServer]:
    """A server that keeps its data in `directory`, stopped at the end."""
    running = EmbeddedServer(directory)
    try:
        yield running
    finally:
        running.stop()


def eventually(condition: Callable[[], _T], what: str, seconds: float = 60.0) -> _T:
    """Wait until `condition` returns something true, and return that. Fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.005)
    return value
