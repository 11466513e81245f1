"""A model ready for a backend: its program, and the tensors that the program's weights are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from batonq.engine.models import decoder
from batonq.engine.models.config import ModelConfig
from batonq.engine.models.rope import rope_tables
from batonq.engine.models.source import ModelSource
from batonq.engine.models.weights import load_weights, weights_digest
from batonq.kernels.program import DType, Program


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a backend and an engine need to know of a model."""

    name: str
    directory: Path
    config: ModelConfig
    program: Program
    #: By the names in `program.weights[i].sources`; mapped from disk, in the dtype of the files.
    weights: Mapping[str, Tensor]
    #: See `weights.weights_digest`: equal on machines that hold the same files.
    weights_digest: bytes

    @property
    def max_model_len(self) -> int:
        """Tokens that a context can have at most, input and output."""
        return self.config.max_position_embeddings


def load_model(source: ModelSource, dtype: Literal["float32", "bfloat16"] = "float32") -> LoadedModel:
    """Reads a model; raises `ModelNotUsable` or `UnsupportedModel` if it can't be run."""
    config = ModelConfig.from_directory(source.directory)
    program = decoder.build(config, DType[dtype.upper()])
    made = dict(zip((decoder.ROPE_COS, decoder.ROPE_SIN), _rope_tensors(config), strict=True))
    expected = [name for weight in program.weights for name in weight.sources if name not in made]
    unused = decoder.UNUSED_SUFFIXES + (("lm_head.weight",) if config.tie_word_embeddings else ())
    stored = load_weights(source.directory, expected, unused)
    digest = weights_digest(source.directory)
    return LoadedModel(source.name, source.directory, config, program, stored | made, digest)


def _rope_tensors(config: ModelConfig) -> tuple[Tensor, Tensor]:
    cos, sin = rope_tables(config.rope, config.head_dim, config.max_position_embeddings)
    return torch.from_numpy(cos), torch.from_numpy(sin)
