"""Random models of a few thousand parameters, made and saved by transformers, which is the oracle for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from batonq.engine.config import EngineConfig
from batonq.engine.engine import Engine
from batonq.engine.loading import EngineOptions, load_engine
from batonq.engine.models import ModelSource, load_model
from batonq.kernels.logits import Logits

DTypeName = Literal["float32", "bfloat16"]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}

_GQA2 = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_MQA6 = {
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "hidden_size": 42,
    "intermediate_size": 51,
    "vocab_size": 131,
}

#: By name: GQA groups of 1, 3 and 6; tied and untied heads; biases; sizes that divide nothing; each kind of rope; each
#: family, with windows shorter than a block and across blocks.
VARIANTS: dict[str, dict[str, Any]] = {
    "mha-tied": {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "gqa3-untied": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 16},
    "mqa6-odd": _MQA6 | {"head_dim": 10},
    "biases": _GQA2 | {"attention_bias": True, "mlp_bias": True},
    "rope-llama3": _GQA2 | {"rope_parameters": LLAMA3_ROPE},
    "rope-linear": _GQA2 | {"rope_parameters": LINEAR_ROPE},
    "qwen2": _GQA2 | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-windows": _GQA2
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen3": _GQA2 | {"model_type": "qwen3"},
    "qwen3-biases": _GQA2 | {"model_type": "qwen3", "attention_bias": True},
    "mistral": _GQA2 | {"model_type": "mistral", "sliding_window": 24},
    "mistral-long": _GQA2 | {"model_type": "mistral", "sliding_window": 75, "rope_parameters": LINEAR_ROPE},
    "long": _MQA6 | {"head_dim": 32, "max_position_embeddings": 1024},
    "long-windows": _GQA2 | {"model_type": "mistral", "sliding_window": 300, "max_position_embeddings": 1024},
    "bytes": _GQA2 | {"vocab_size": 257, "max_position_embeddings": 2048},
    "mistral-full": _GQA2 | {"model_type": "mistral", "sliding_window": None, "head_dim": 10},
}

#: One variant of each family.
FAMILIES = {"llama": "gqa3-untied", "qwen2": "qwen2", "qwen3": "qwen3", "mistral": "mistral"}


def make(variant: str) -> PreTrainedModel:
    """The model of a variant in float32, always with the same weights; the process's generator is left alone."""
    sizes = {"vocab_size": 160, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
    settings: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 256, **sizes, **VARIANTS[variant]}
    config = AutoConfig.for_model(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Larger than at initialisation, so that logits spread and every layer shows.
                spread = torch.randn_like(parameter) * 0.15
                parameter.copy_(1.0 + spread if "norm" in name else spread)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def save(variant: str, directory: Path, **options: Any) -> PreTrainedModel:
    """Makes the variant and saves it as a Hugging Face directory."""
    model = make(variant)
    model.save_pretrained(directory, **options)
    return model


def save_tokenizer(directory: Path) -> None:
    """A tokenizer of one token a byte; 256 is EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(tokenizer_models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')


def engine(directory: Path, num_blocks: int = 256, dtype: DTypeName = "float32", **config: int) -> Engine[Logits]:
    """An engine over a saved model, with its tokenizer, on one thread unless told otherwise."""
    spec = load_model(ModelSource("tiny", directory), dtype).program.kv_cache
    settings = EngineConfig(kv_cache_memory_bytes=num_blocks * spec.bytes_per_block, **{"num_threads": 1, **config})
    return load_engine(EngineOptions(str(directory), dtype=dtype, config=settings).to_dict())[0]
