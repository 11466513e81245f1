"""Stands between a worker and its server, and loses what it is told to lose."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit


class Proxy:
    """Passes bytes between clients of `url` and a server's Unix socket.

    `cut` true: nothing passes either way, as when a network is gone; connections stay open and say nothing.
    `lose_reply_to` bytes of a request: it reaches the server and is carried out, then the connection breaks, once;
    `lost` is set, after `on_loss` was called.
    """

    def __init__(self, directory: Path, server_url: str) -> None:
        self._server = unquote(urlsplit(server_url).path)
        self._path = directory / "proxy.sock"
        self.url = f"unix://{quote(str(self._path))}"
        self.cut = threading.Event()
        self.lost = threading.Event()
        self.lose_reply_to: bytes | None = None
        self.on_loss: Callable[[], object] = bool
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                with suppress(OSError):
                    server.connect(self._server)
                    for pump, ends in ((self._forth, (client, server)), (self._back, (server, client))):
                        threading.Thread(target=pump, args=ends, daemon=True).start()

    def _forth(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while chunk := client.recv(1 << 20):
                if self.cut.is_set():
                    continue
                if self.lose_reply_to is not None and self.lose_reply_to in chunk:
                    self._lose(chunk)
                    client.shutdown(socket.SHUT_RDWR)
                    break
                server.sendall(chunk)
        server.close()
        client.close()

    def _lose(self, chunk: bytes) -> None:
        """Has the server carry a request out on a connection of its own, and keeps the reply."""
        self.lose_reply_to = None
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(self._server)
            server.sendall(chunk)
            assert server.recv(1 << 20)
        self.on_loss()
        self.lost.set()

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while chunk := server.recv(1 << 20):
                if not self.cut.is_set():
                    client.sendall(chunk)
        client.close()


@contextmanager
def proxy(directory: Path, server_url: str) -> Iterator[Proxy]:
    made = Proxy(directory, server_url)
    try:
        yield made
    finally:
        made.close()
