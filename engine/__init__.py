"""Contexts, scheduler, blocks, sampler and text: everything that turns prompts into tokens. Never Redis."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batonq.engine.config import EngineConfig
    from batonq.engine.engine import Engine, Generation
    from batonq.engine.loading import load_engine
    from batonq.engine.sampling_params import SamplingParams

__all__ = ["Engine", "EngineConfig", "Generation", "SamplingParams", "load_engine"]

_HOME = {
    "Engine": "batonq.engine.engine",
    "EngineConfig": "batonq.engine.config",
    "Generation": "batonq.engine.engine",
    "SamplingParams": "batonq.engine.sampling_params",
    "load_engine": "batonq.engine.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
