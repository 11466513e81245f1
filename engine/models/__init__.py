"""Models: from a name to a directory, from a directory to a program with its weights."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batonq.engine.models.config import ModelConfig
    from batonq.engine.models.loader import LoadedModel, load_model
    from batonq.engine.models.source import ModelSource, resolve_model

__all__ = ["LoadedModel", "ModelConfig", "ModelSource", "load_model", "resolve_model"]

_HOME = {
    "LoadedModel": "batonq.engine.models.loader",
    "ModelConfig": "batonq.engine.models.config",
    "ModelSource": "batonq.engine.models.source",
    "load_model": "batonq.engine.models.loader",
    "resolve_model": "batonq.engine.models.source",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
