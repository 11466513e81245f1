"""The families of dense decoders, by the `architectures` of their `config.json`: how each differs from the others.

Source: transformers' `configuration_*.py` and `modeling_*.py` of llama, qwen2, qwen3 and mistral.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Windows(Enum):
    """Which layers look back no further than `sliding_window` tokens."""

    NONE = 0
    ALL = 1
    #: If `use_sliding_window`: those that `layer_types` says, or all from `max_window_layers` on.
    BY_LAYER = 2


@dataclass(frozen=True, slots=True)
class Family:
    """What isn't read from `config.json`, or is read otherwise than in the other families."""

    #: Values that a file without these fields means.
    defaults: Mapping[str, int] = field(default_factory=dict)
    #: Biases of the projections q, k and v, and of o; None: as `attention_bias` says.
    qkv_bias: bool | None = False
    o_bias: bool | None = False
    #: Whether `mlp_bias` is a field of the family; without it there are none.
    reads_mlp_bias: bool = False
    #: RMSNorm of each query and key head before the rotary embedding.
    qk_norm: bool = False
    windows: Windows = Windows.NONE


_QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(qkv_bias=None, o_bias=None, reads_mlp_bias=True),
    "MistralForCausalLM": Family({"num_key_value_heads": 8, "sliding_window": 4096}, windows=Windows.ALL),
    "Qwen2ForCausalLM": Family(_QWEN_DEFAULTS, qkv_bias=True, windows=Windows.BY_LAYER),
    "Qwen3ForCausalLM": Family(
        _QWEN_DEFAULTS | {"head_dim": 128}, qkv_bias=None, o_bias=None, qk_norm=True, windows=Windows.BY_LAYER
    ),
}
