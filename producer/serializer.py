"""The serializer of jobs and results: msgpack, for plain data only.

Give this module to rq wherever it takes a serializer (`serializer="batonq.producer.serializer"` or the module itself).
A payload is data and can never run code when read, unlike rq's default, pickle.
"""

from __future__ import annotations

from typing import Any

import msgpack  # type: ignore[import-untyped, unused-ignore]


def dumps(value: Any) -> bytes:
    """Pack plain data (None, bool, int, float, str, bytes, list, dict). Raises TypeError for anything else."""
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def loads(payload: bytes) -> Any:
    """Unpack what `dumps` made. Raises ValueError for a payload that is not msgpack (a pickle, for instance)."""
    return msgpack.unpackb(payload, raw=False, strict_map_key=False)
