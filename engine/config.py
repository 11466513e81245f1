"""The settings of an engine, under vLLM's names, and the defaults that stand for a small CPU machine."""

from __future__ import annotations

from dataclasses import dataclass, fields

from batonq.engine.errors import EngineError


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine. All in tokens or contexts, but `kv_cache_memory_bytes`."""

    #: Contexts that run at once.
    max_num_seqs: int = 64
    #: Tokens that one step computes, prefill chunks and decodes together.
    max_num_batched_tokens: int = 512
    #: Memory of the KV block pool, in bytes; the pool is as many whole blocks as fit.
    kv_cache_memory_bytes: int = 1 << 30
    #: Longest context; None: what the model was trained for.
    max_model_len: int | None = None
    #: Tokens guessed for a context in a step, at most (`engine/speculation.py`); 0: none.
    num_speculative_tokens: int = 8
    #: Threads of the arithmetic; None: one per available core.
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for setting in fields(self):
            name, value = setting.name, getattr(self, setting.name)
            least = 0 if name == "num_speculative_tokens" else 1
            if value is not None and value < least:
                raise EngineError("invalid_configuration", f"{name} must be at least {least}, got {value}", name)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise EngineError(
                "invalid_configuration",
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs ({self.max_num_seqs}): "
                "a step could not decode every running context",
                "max_num_batched_tokens",
            )
