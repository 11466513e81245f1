"""The child process as the parent sees it: started, spoken to, and gone."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import subprocess
import sys
from typing import Any

from batonq.worker.errors import EngineUnavailable, ModelUnavailable
from batonq.worker.messages import Channel, Load, LoadFailed, Message, Ready, unpack_ids
from batonq.worker.signals import StopRequests
from batonq.worker.step_marker import StepMarker
from batonq.worker.timing import Timing

#: Engine processes that may die in a row before they are ready.
MAX_START_FAILURES = 3
#: Seconds that a child has for its exit once its end of the channel is closed.
EXIT_SECONDS = 10.0
#: As many rings as a pipe holds.
_MAX_RINGS = 1 << 16

logger = logging.getLogger(__name__)


class EngineProcess:
    """A child that builds the engine named by `engine` (a module with `load_engine`) from plain `options`."""

    def __init__(self, engine: str, options: dict[str, Any], timing: Timing) -> None:
        """Is killed when for a `step_timeout` it takes nothing of what is said to it."""
        ours, theirs = socket.socketpair()
        bell, to_ring = os.pipe()
        os.set_blocking(bell, False)
        self._bell = os.fdopen(bell, "rb", buffering=0)
        self._marker = StepMarker()
        with theirs:
            passed = (theirs.fileno(), to_ring, self._marker.fd)
            command = [sys.executable, "-m", "batonq.worker.child", *map(str, passed), str(os.getpid())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=passed)
            os.close(to_ring)
        self._channel = Channel(ours, patience=timing.step_timeout)
        #: Once it has ended: numbers of the contexts in the step that its death interrupted.
        self.in_step: list[int] = []
        self._status: int | None = None
        self.send(Load(engine, options, timing.commit_interval))

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def fileno(self) -> int:
        """For select: readable when a message is there that can't wait, or the child is gone."""
        return self._bell.fileno()

    def send(self, message: Message) -> None:
        """Send, unless the child is gone, or hangs and is killed: that shows in `gone`."""
        try:
            self._channel.send(message)
        except TimeoutError as error:
            logger.error("the engine hangs, and is killed: %s", error)
            self.kill()

    def receive(self) -> list[Message]:
        """Messages that are there."""
        return self._channel.receive(wait=False)

    def clear(self) -> None:
        """Forget past rings of the bell."""
        self._bell.read(_MAX_RINGS)

    @property
    def gone(self) -> bool:
        """Whether the child has closed its end, and everything that it ever said has been received."""
        return self._channel.closed

    def await_ready(self, stops: StopRequests) -> Ready | None:
        """Wait for the engine. None if the child died or a stop request came first; LoadFailed raises."""
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            selector.register(stops, selectors.EVENT_READ)
            while not self.gone and not stops.count:
                selector.select()
                for message in self.receive():
                    if isinstance(message, LoadFailed):
                        raise ModelUnavailable(message.code, message.message)
                    if isinstance(message, Ready):
                        return message
        return None

    def kill(self) -> None:
        """SIGKILL the child: that shows in `gone` as any other death does."""
        self._process.kill()

    def end(self, seconds: float = EXIT_SECONDS) -> int:
        """Wait for the exit, killing after `seconds`; the exit status, negative for a signal. May be called again."""
        if self._status is not None:
            return self._status
        try:
            self._status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._status = self._process.wait()
        self._channel.close()
        self._bell.close()
        self.in_step = unpack_ids(self._marker.read())
        self._marker.close()
        return self._status


def start_engine(
    engine: str, options: dict[str, Any], timing: Timing, stops: StopRequests
) -> tuple[EngineProcess, Ready] | None:
    """Start a child and wait until its engine is ready; None if a stop request came first.

    Raises ModelUnavailable if the engine can't be built, EngineUnavailable if the child dies again and again.
    """
    for _ in range(MAX_START_FAILURES):
        process = EngineProcess(engine, options, timing)
        try:
            ready = process.await_ready(stops)
        except ModelUnavailable:
            process.end()
            raise
        if ready is not None:
            return process, ready
        status = process.end(0 if stops.count else EXIT_SECONDS)
        if stops.count:
            return None
        logger.error("the engine ended with status %d before it was ready", status)
    raise EngineUnavailable("engine_start_failed", f"the engine died {MAX_START_FAILURES} times before it was ready")
