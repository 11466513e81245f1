"""The arithmetic: a model as a program of typed ops, the backends that run it, and the sampler. Knows no requests."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batonq.kernels.batch import Batch
    from batonq.kernels.program import KVCacheSpec, Program
    from batonq.kernels.reference import ReferenceBackend
    from batonq.kernels.sampling import SamplingBatch

__all__ = ["Batch", "KVCacheSpec", "Program", "ReferenceBackend", "SamplingBatch"]

_HOME = {
    "Batch": "batonq.kernels.batch",
    "KVCacheSpec": "batonq.kernels.program",
    "Program": "batonq.kernels.program",
    "ReferenceBackend": "batonq.kernels.reference",
    "SamplingBatch": "batonq.kernels.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
