"""A model ready for a backend: its program, and its weights as a backend wants them, read when it asks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from batonq.engine.models import decoder
from batonq.engine.models.cache import cache_directory, file_made_once
from batonq.engine.models.config import ModelConfig
from batonq.engine.models.rope import rope_tables
from batonq.engine.models.source import ModelSource
from batonq.engine.models.weights import load_weights, weights_digest
from batonq.kernels import packed
from batonq.kernels.packed import PackedWeights
from batonq.kernels.program import DType, Program

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a backend and an engine need to know of a model."""

    name: str
    directory: Path
    config: ModelConfig
    program: Program
    #: See `weights.weights_digest`: equal on machines that hold the same files.
    weights_digest: bytes

    @property
    def max_model_len(self) -> int:
        """Tokens that a context can have at most, input and output."""
        return self.config.max_position_embeddings

    def tensors(self) -> Mapping[str, Tensor]:
        """The weights by the names in `program.weights[i].sources`, mapped from disk, in the dtype of the files.

        Raises `ModelNotUsable` if the files don't hold what the config says.
        """
        import torch  # noqa: PLC0415  # takes seconds, and isn't needed once the weights are packed

        tables = rope_tables(self.config.rope, self.config.head_dim, self.config.max_position_embeddings)
        made = dict(zip((decoder.ROPE_COS, decoder.ROPE_SIN), map(torch.from_numpy, tables), strict=True))
        expected = [name for weight in self.program.weights for name in weight.sources if name not in made]
        unused = decoder.UNUSED_SUFFIXES + (("lm_head.weight",) if self.config.tie_word_embeddings else ())
        return load_weights(self.directory, expected, unused) | made

    def packed(self) -> PackedWeights:
        """The weights in the compiled library's layout, from the cache directory, where a first use puts them.

        Raises what `tensors` raises, then.
        """
        key = blake2b(self.weights_digest + packed.key(self.program), digest_size=16).hexdigest()
        path = cache_directory() / "packed" / key
        return file_made_once(path, lambda: PackedWeights.open(path, self.program), self._pack)

    def _pack(self, file: BinaryIO) -> None:
        logger.info("packing the weights of %s into %s, once", self.name, file.name)
        tensors = self.tensors()
        packed.write(file, self.program, lambda name: tensors[name].float().numpy())


def load_model(source: ModelSource, dtype: Literal["float32", "bfloat16"] = "float32") -> LoadedModel:
    """A model's config, program and digest; raises `ModelNotUsable` or `UnsupportedModel` if it can't be run."""
    config = ModelConfig.from_directory(source.directory)
    program = decoder.build(config, DType[dtype.upper()])
    return LoadedModel(source.name, source.directory, config, program, weights_digest(source.directory))
