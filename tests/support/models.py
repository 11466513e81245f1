"""The models that tests load: SmolLM2 from the alias. Plain functions, which conftest.py makes into fixtures."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from batonq.engine.models import LoadedModel, load_model, resolve_model
from batonq.engine.models.source import ALIAS


def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a directory; dequantised on first use of a cache directory."""
    return resolve_model(ALIAS).directory


@cache
def smollm2() -> LoadedModel:
    """The same, loaded in float32."""
    return load_model(resolve_model(ALIAS))
