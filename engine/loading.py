"""Puts an engine together for a model, and the light half of it that turns requests into token ids.

The two may live in different processes: only `load_engine` needs torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from batonq.engine.config import EngineConfig
from batonq.engine.engine import Engine, ModelSpec
from batonq.engine.errors import EngineError
from batonq.engine.text import Vocabulary
from batonq.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from batonq.engine.models import LoadedModel
    from batonq.engine.sampler import SamplingArithmetic
    from batonq.kernels.backend import Backend
    from batonq.kernels.logits import Logits


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """All that decides which engine is built."""

    #: A directory, a GGUF file, the alias `smollm2-135m`, or a hub id.
    model: str
    #: Name under which it is served; empty: the alias or the directory's name.
    served_model_name: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"
    config: EngineConfig = field(default_factory=EngineConfig)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for the wire."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> EngineOptions:
        """Inverse of `to_dict`."""
        return cls(**{**data, "config": EngineConfig(**data["config"])})


def default_served_model_name(model: str) -> str:
    """The alias, the directory's or file's name, or the last part of a hub id."""
    path = Path(model).expanduser()
    return path.stem if path.suffix == ".gguf" else (path.resolve().name if path.is_dir() else path.name)


def load_engine(options: dict[str, Any]) -> tuple[Engine[Logits], Path]:
    """Build the engine that `EngineOptions.to_dict` describes; with it the model's directory, for `Frontend`.

    Raises EngineError (a model that is not there or not supported, a cache without room) and OSError.
    """
    # Read when OpenMP is loaded. By default its threads spin for so long that a core shared with anyone else collapses;
    # this many turns cost a few per cent on an idle machine and save up to nine tenths on a busy one.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # Imported here: torch takes seconds and hundreds of MB, and `Frontend` doesn't need it.
    from batonq.engine.models import load_model, resolve_model  # noqa: PLC0415
    from batonq.engine.runner import BackendRunner  # noqa: PLC0415
    from batonq.engine.sampler import PlanSampler  # noqa: PLC0415
    from batonq.kernels.backend import make_backend  # noqa: PLC0415
    from batonq.kernels.errors import KernelError  # noqa: PLC0415

    wanted = EngineOptions.from_dict(options)
    model = load_model(resolve_model(wanted.model), wanted.dtype)
    frontend = Frontend(model.directory)
    cache = model.program.kv_cache
    num_blocks = wanted.config.kv_cache_memory_bytes // cache.bytes_per_block
    try:
        backend = make_backend(model.program, model, num_blocks, wanted.config.num_threads)
    except KernelError as error:
        raise EngineError(error.code, error.message, error.param) from error
    eos = frozenset(frontend.tokenizer.eos_token_ids)
    spec = ModelSpec(
        model_id=wanted.served_model_name or model.name,
        max_model_len=model.max_model_len,
        vocab_size=model.program.vocab_size,
        eos_token_ids=eos,
        block_size=cache.block_size,
        bytes_per_block=cache.bytes_per_block,
        numerics_id=backend.numerics_id,
        namespace=_namespace(model, backend.numerics_id, backend.layout_id),
        weights_id=model.weights_digest.hex(),
    )
    sampler = PlanSampler(eos, _sampling_arithmetic(backend))
    engine = Engine(spec, wanted.config, BackendRunner(backend), sampler, frontend, frontend.vocabulary)
    return engine, model.directory


def _sampling_arithmetic(backend: Backend) -> SamplingArithmetic:
    """Compiled beside the compiled backend, on its threads; in torch beside the reference."""
    from batonq.kernels.cpu_backend import CpuBackend  # noqa: PLC0415

    if isinstance(backend, CpuBackend):
        from batonq.kernels.cpu_sampling import CpuSampler  # noqa: PLC0415

        return CpuSampler(backend.team, backend.isa)
    from batonq.kernels import reference_sampling  # noqa: PLC0415

    return reference_sampling


def _namespace(model: LoadedModel, numerics_id: str, layout_id: str) -> bytes:
    """All that makes two KV blocks of the same tokens differ; a model's name is not part of it."""
    parts = (model.weights_digest, numerics_id.encode(), layout_id.encode())
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()


class Frontend:
    """Token ids from text and conversations, and the bytes of tokens, for the model in a directory."""

    def __init__(self, model_directory: Path) -> None:
        self._directory = model_directory
        self.tokenizer = Tokenizer.from_directory(model_directory)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of the tokens, for whoever turns ids into text."""
        tokenizer = self.tokenizer
        return Vocabulary(tokenizer.token_bytes, tokenizer.special_token_ids, tokenizer.adds_leading_space)

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt; BOS exactly once if the model wants it."""
        return self.tokenizer.encode(text)

    def encode_word(self, text: str) -> list[int]:
        """Token ids of the text alone."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant speaks. Raises EngineError without a template."""
        from batonq.engine.chat_template import ChatTemplate  # noqa: PLC0415  # jinja2, for chats only

        template = ChatTemplate.from_directory(self._directory)
        # The template writes the special tokens itself.
        return self.tokenizer.encode(template.render(list(messages)), add_special_tokens=False)


def load_frontend(model_directory: str) -> Frontend:
    """The light half of the engine for a model's directory."""
    return Frontend(Path(model_directory))
