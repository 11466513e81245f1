"""The cache directory, and how files and directories appear in it: whole or not at all, made by one process."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_directory() -> Path:
    """`BATONQ_CACHE_DIR`, or `~/.cache/batonq`."""
    configured = os.environ.get("BATONQ_CACHE_DIR")
    return Path(configured) if configured else Path.home() / ".cache" / "batonq"


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that no reader ever sees in part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)


def directory_made_once(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, after `make` has filled it, which happens once however many processes ask at the same time.

    `make` fills a temporary directory beside it, which is renamed when complete; the lock file beside it stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f"{path.name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_dir():
            return path
        for abandoned in path.parent.glob(f".{path.name}.*"):  # by a process that died here, as the lock is ours
            shutil.rmtree(abandoned, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            make(temporary)
            temporary.rename(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return path
