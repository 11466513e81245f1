"""The fleet of a run that was given no Redis: an embedded server and one worker process, both gone when the run is."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

from batonq.producer import keys, process
from batonq.producer.client import connect
from batonq.producer.embedded import EmbeddedServer
from batonq.producer.errors import WorkerError
from batonq.producer.state import RunState

#: Restarts of a worker that died, with no row finished in between.
MAX_RESTARTS = 3

#: From SIGTERM to SIGKILL, in seconds: the worker finishes a step, commits, and releases what it runs.
STOP_SECONDS = 30.0

_POLL_SECONDS = 0.05


class LocalFleet:
    """Owns the server and the worker. `url` is the server's."""

    def __init__(self, state: RunState, command: Sequence[str], served_model_name: str) -> None:
        """Start the server. `command` starts a worker; the server's URL is appended to it."""
        self._state = state
        self._command = command
        self._queue = served_model_name
        self._log = state.directory / "worker.log"
        self._worker: subprocess.Popen[bytes] | None = None
        self._progress_at_start = 0
        self._restarts = 0
        self._server = EmbeddedServer(state.directory / "valkey", keep_open=[state.lock])
        self.url = self._server.url
        self._log.write_bytes(b"")

    def start_worker(self, while_waiting: Callable[[], bool]) -> None:
        """Start the worker and wait until it has registered for its queue, or `while_waiting` returns False.

        Raises WorkerError, with the end of its log, if it ends before that: what stops it once would stop it again.
        """
        registered = keys.workers_of_queue(self._queue)
        with connect(self.url) as connection:
            # Workers of a run that was killed are in the books still; ours takes over from them.
            dead = connection.smembers(registered)
            worker = self._start()
            while not connection.smembers(registered) - dead and while_waiting():
                self._check_server()
                try:
                    worker.wait(_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
                raise self._died("worker_not_started", "the worker ended before it was ready")

    def check(self, progress: int) -> str | None:
        """Start a worker that died again; say so. `progress` is any number that grows as work gets done.

        Raises WorkerError after MAX_RESTARTS without progress, ServerError if the server died.
        """
        self._check_server()
        if self._worker is None or self._worker.poll() is None:
            return None
        if progress > self._progress_at_start:
            self._restarts = 0
        if self._restarts == MAX_RESTARTS:
            raise self._died("worker_died", f"the worker died {MAX_RESTARTS + 1} times without finishing a row")
        code = self._worker.returncode
        self._restarts += 1
        self._progress_at_start = progress
        self._start()
        return f"the worker ended with code {code}; started again (log: {self._log})"

    def stop_worker(self) -> None:
        """Have the worker release what it runs and end."""
        if self._worker is not None:
            process.stop(self._worker, STOP_SECONDS)
            self._worker = None

    def stop(self) -> None:
        """End both; the server keeps its data."""
        self.stop_worker()
        self._server.stop()

    def kill(self) -> None:
        """End both at once, from a signal handler; the server keeps what it has acknowledged."""
        if self._worker is not None:
            process.kill_now(self._worker)
        process.kill_now(self._server.process)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [*self._command, "--redis-url", self.url]
        try:
            self._worker = process.start(command, log=self._log, keep_open=[self._state.lock])
        except OSError as error:
            message = f"the worker cannot be started: {command[0]}: {error.strerror}"
            raise WorkerError("worker_not_started", message, command=command) from None
        return self._worker

    def _check_server(self) -> None:
        if not self._server.alive:
            raise self._server.died()

    def _died(self, code: str, sentence: str) -> WorkerError:
        returncode = self._worker.poll() if self._worker is not None else None
        message = f"{sentence} (exit code {returncode}); the end of {self._log}:\n{process.log_tail(self._log)}"
        return WorkerError(code, message, exit_code=returncode, log=str(self._log))
