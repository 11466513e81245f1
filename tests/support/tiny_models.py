"""Random Llama models of a few thousand parameters, made and saved by transformers: an oracle for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}

#: By name: GQA groups of 1, 3 and 6; tied and untied heads; biases; sizes that divide nothing; each kind of rope.
VARIANTS: dict[str, dict[str, Any]] = {
    "mha-tied": {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "gqa3-untied": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8},
    "mqa6-odd": {
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "hidden_size": 42,
        "head_dim": 10,
        "intermediate_size": 51,
        "vocab_size": 131,
    },
    "biases": {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "rope-llama3": {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": LLAMA3_ROPE},
    "rope-linear": {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": LINEAR_ROPE},
}


def make(variant: str) -> LlamaForCausalLM:
    """The model of a variant in float32, always with the same weights; the process's generator is left alone."""
    sizes = {"vocab_size": 160, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
    config = LlamaConfig(max_position_embeddings=256, **sizes | VARIANTS[variant])
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model: LlamaForCausalLM = LlamaForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Larger than at initialisation, so that logits spread and every layer shows.
                spread = torch.randn_like(parameter) * 0.15
                parameter.copy_(1.0 + spread if "norm" in name else spread)
    return model


def save(variant: str, directory: Path, **options: Any) -> LlamaForCausalLM:
    """Makes the variant and saves it as a Hugging Face directory."""
    model = make(variant)
    model.save_pretrained(directory, **options)
    return model
