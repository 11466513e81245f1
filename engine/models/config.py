"""What a model is, read from its `config.json`: sizes, rotary embedding, and the features that its family may use.

Anything that would change the output and isn't carried out is refused with the field and its value.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from batonq.engine.errors import ModelNotUsable, UnsupportedModel
from batonq.engine.models.families import FAMILIES, Windows

_Value = TypeVar("_Value", int, float, bool)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base frequency and how it is stretched beyond the positions of pre-training."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    #: `llama3` only: wavelengths between original / high and original / low are blended.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a program is built from: fields of `config.json`, in its own names where they are clear, and the family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    #: Of each layer, the tokens that attention looks back to, its own included; 0: all.
    windows: tuple[int, ...]

    @classmethod
    def from_directory(cls, directory: Path) -> ModelConfig:
        """Reads `directory/config.json`."""
        path = directory / "config.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelNotUsable(str(directory), "it has no config.json") from None
        except ValueError as error:
            raise ModelNotUsable(str(directory), f"its config.json is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise ModelNotUsable(str(directory), "its config.json is not an object")
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """From the parsed file; `UnsupportedModel` names a field that is missing, malformed or not carried out."""
        architecture = _refuse_unsupported(data)
        family = FAMILIES[architecture]
        data = {**family.defaults, **data}
        attention_bias = _optional(data, "attention_bias", False)
        heads = _required(data, "num_attention_heads", int)
        kv_heads = _optional(data, "num_key_value_heads", heads)
        hidden_size = _required(data, "hidden_size", int)
        if kv_heads < 1 or heads % kv_heads:
            raise UnsupportedModel("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
        head_dim = _optional(data, "head_dim", hidden_size // heads)
        if head_dim % 2:
            raise UnsupportedModel("head_dim", head_dim, "an even number")
        max_positions = _required(data, "max_position_embeddings", int)
        return cls(
            architecture=architecture,
            vocab_size=_required(data, "vocab_size", int),
            hidden_size=hidden_size,
            intermediate_size=_required(data, "intermediate_size", int),
            num_layers=_required(data, "num_hidden_layers", int),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rms_norm_eps=_required(data, "rms_norm_eps", float),
            rope=_rope(data, max_positions),
            tie_word_embeddings=_optional(data, "tie_word_embeddings", False),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.o_bias is None else family.o_bias,
            mlp_bias=family.reads_mlp_bias and _optional(data, "mlp_bias", False),
            qk_norm=family.qk_norm,
            windows=_windows(data, family.windows),
        )


def _refuse_unsupported(data: dict[str, Any]) -> str:
    """The architecture, if nothing in the config asks for what no program here does."""
    architectures = data.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in FAMILIES:
        raise UnsupportedModel("architectures", architectures, " or ".join(FAMILIES))
    if data.get("hidden_act") != "silu":
        raise UnsupportedModel("hidden_act", data.get("hidden_act"), "silu")
    if data.get("quantization_config") is not None:
        raise UnsupportedModel("quantization_config", data["quantization_config"], "unquantised weights")
    return str(architectures[0])


def _windows(data: dict[str, Any], which: Windows) -> tuple[int, ...]:
    """The window of each layer; `layer_types`, if there, must say what the family can do."""
    layers = _required(data, "num_hidden_layers", int)
    is_off = which is Windows.BY_LAYER and not _optional(data, "use_sliding_window", False)
    window = 0 if is_off else _optional(data, "sliding_window", 0)
    if not window:
        kinds = ["full_attention"]
    elif which is Windows.ALL:
        kinds = ["sliding_attention"]
    elif which is Windows.BY_LAYER:
        kinds = ["full_attention", "sliding_attention"]
    else:
        raise UnsupportedModel("sliding_window", window, "none")
    types = data.get("layer_types")
    if types is None:
        first = _optional(data, "max_window_layers", layers) if len(kinds) == 2 else 0
        types = [kinds[-1] if layer >= first else kinds[0] for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or any(kind not in kinds for kind in types):
        raise UnsupportedModel("layer_types", types, f"{layers} times {' or '.join(kinds)}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _rope(data: dict[str, Any], max_positions: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    rope = data.get("rope_parameters") or {"rope_theta": data.get("rope_theta")} | (data.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = _optional(rope, "rope_theta", 10000.0)
    if _optional(rope | data, "partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("partial_rotary_factor", data.get("partial_rotary_factor"), "1.0")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", _required(rope, "factor", float))
    if kind == "llama3":
        return RopeConfig(
            theta,
            "llama3",
            _required(rope, "factor", float),
            _required(rope, "low_freq_factor", float),
            _required(rope, "high_freq_factor", float),
            _optional(rope, "original_max_position_embeddings", max_positions),
        )
    raise UnsupportedModel("rope_type", kind, "default, linear or llama3")


def _required(data: dict[str, Any], field: str, kind: type[_Value]) -> _Value:
    value = data.get(field)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return kind(value)
    if not isinstance(value, kind) or (kind is not bool and (isinstance(value, bool) or value <= 0)):
        raise UnsupportedModel(field, value, "true or false" if kind is bool else f"a positive {kind.__name__}")
    return value


def _optional(data: dict[str, Any], field: str, default: _Value) -> _Value:
    return default if data.get(field) is None else _required(data, field, type(default))
