"""The tensors of a directory of safetensors files, single or sharded, mapped from disk and not copied.

Also the digest that names them: content, not dates, so that copies of a model on two machines have the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import TYPE_CHECKING

from batonq.engine.errors import ModelNotUsable
from batonq.engine.models.cache import cache_directory, write_atomically

if TYPE_CHECKING:
    from torch import Tensor

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model, sorted: `model.safetensors`, or those that the index names."""
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    index = directory / _INDEX
    if not index.is_file():
        raise ModelNotUsable(str(directory), f"it has neither {_SINGLE} nor {_INDEX}")
    names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise ModelNotUsable(str(directory), f"its index names {name}, which isn't there")
    return [directory / name for name in names]


def load_weights(directory: Path, expected: Iterable[str], unused: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The tensors named `expected`, in the file's dtype.

    A missing name or an unexpected one, other than those that end in one of `unused`, raises `ModelNotUsable`:
    either means that the config doesn't describe these weights.
    """
    # Imported here: only a first use of a model, and the backend in torch, need them.
    from safetensors import SafetensorError  # noqa: PLC0415
    from safetensors.torch import load_file  # noqa: PLC0415

    tensors: dict[str, Tensor] = {}
    for path in weight_files(directory):
        try:
            tensors |= load_file(path)
        except SafetensorError as error:
            raise ModelNotUsable(str(directory), f"{path.name} can't be read: {error}") from None
    wanted = set(expected)
    missing = sorted(wanted - tensors.keys())
    unexpected = sorted(name for name in tensors.keys() - wanted if not name.endswith(unused))
    for what, names in (("lack", missing), ("hold unexpectedly", unexpected)):
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise ModelNotUsable(str(directory), f"its weights {what} {shown}")
    return {name: tensors[name] for name in sorted(wanted)}


def weights_digest(directory: Path) -> bytes:
    """BLAKE2b-128 over the bytes of `config.json` and of the safetensors files, in order of name.

    Hashing half a gigabyte takes about a second, so each file's digest is remembered in the cache directory under its
    path, size and modification time.
    """
    state = blake2b(digest_size=16)
    state.update((directory / "config.json").read_bytes())
    for path in weight_files(directory):
        state.update(path.name.encode() + b"\0" + _file_digest(path))
    return state.digest()


def _file_digest(path: Path) -> bytes:
    status = path.stat()
    identity = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    memo = cache_directory() / "digests" / blake2b(identity.encode(), digest_size=16).hexdigest()
    if memo.is_file() and len(known := memo.read_bytes()) == blake2b.MAX_DIGEST_SIZE:
        return known
    with path.open("rb") as file:
        digest = file_digest(file, blake2b).digest()
    write_atomically(memo, digest)
    return digest
