"""The cache directory, and how files and directories appear in it: whole or not at all, made by one process."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

_Opened = TypeVar("_Opened")


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
    with _locked(path):
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


def file_made_once(path: Path, read: Callable[[], _Opened | None], make: Callable[[BinaryIO], None]) -> _Opened:
    """What `read` makes of `path`; where that is None, `make` writes the file anew, in one process only.

    It becomes `path` when it is whole and on the disk, whatever happens to the machine; the lock file beside it stays.
    """
    if (opened := read()) is not None:
        return opened
    with _locked(path):
        if (opened := read()) is not None:
            return opened
        temporary = path.parent / f".{path.name}"
        try:
            with temporary.open("wb") as file:
                make(file)
                file.flush()
                os.fsync(file.fileno())
                # The pages that were written piece by piece are small: who maps the file reads it into larger ones.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        opened = read()
        assert opened is not None, path
        return opened


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps other processes, and other threads, from making `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f"{path.name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
