"""Child processes that live no longer than their owner, deaf to its terminal's Ctrl-C, with their output in a log.

And what every long-lived process of ours does with itself.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
#: New objects after which the collector looks at the youngest. The default, 700, is a handful of jobs.
_COLLECT_AFTER = 20_000


def die_with_parent() -> Callable[[], None]:
    """Make a `preexec_fn` that has the kernel SIGKILL the child when the calling thread's process ends."""
    # Loaded here, because between fork and exec nothing may be imported or allocated for long.
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel was told
            os._exit(1)

    return prepare


def start(command: Sequence[str], *, log: Path, keep_open: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a command in its own session, bound to our life, its stdout and stderr appended to `log`.

    `keep_open` are file descriptors it inherits. Raises OSError if it cannot be executed.
    """
    with log.open("ab") as sink:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
            preexec_fn=die_with_parent(),  # noqa: PLW1509 - it makes one system call
            pass_fds=tuple(keep_open),
        )


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a process made by `start`, and whatever else is in its session's group, and reap it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def kill_now(process: subprocess.Popen[bytes]) -> None:
    """As `kill`, but safe in a signal handler: it doesn't reap, which could wait for a lock that is held below."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)


def stop(process: subprocess.Popen[bytes], seconds: float) -> None:
    """SIGTERM, then SIGKILL to what still lives after `seconds`."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        kill(process)


def log_tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, for an error message; empty if there is no log."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def spare_collector() -> None:
    """Have the collector of reference cycles leave alone what exists by now, and look at the rest less often.

    What start-up made stays for good, and counting references frees what comes and goes with each job.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)
