"""What a service imports to hand out work: the job schema, the Python client and `batonq run`. Never torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batonq.engine.sampling_params import SamplingParams
    from batonq.producer.client import Producer
    from batonq.producer.schema import PromptJob, Result

__all__ = ["Producer", "PromptJob", "Result", "SamplingParams"]

_HOME = {
    "Producer": "batonq.producer.client",
    "PromptJob": "batonq.producer.schema",
    "Result": "batonq.producer.schema",
    "SamplingParams": "batonq.engine.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name == "serializer":  # rq looks `serializer="batonq.producer.serializer"` up as an attribute
        return import_module("batonq.producer.serializer")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
