"""The dense decoder as a program: pre-norm attention and gated MLP, which `families.py` varies.

Source: transformers' `modeling_llama.py` and, for QK norm and windows, `modeling_qwen3.py`. Projections that read the
same input are joined into one weight.
"""

from __future__ import annotations

from batonq.engine.models.config import ModelConfig
from batonq.kernels.program import (
    NONE,
    Activation,
    ActivationMul,
    Add,
    Attention,
    DType,
    Embed,
    HeadNorm,
    KVCacheSpec,
    Linear,
    LmHead,
    Program,
    ProgramBuilder,
    RmsNorm,
    RopeStore,
    Rows,
    SelectRows,
)

#: Names that checkpoints may hold and the program doesn't need.
UNUSED_SUFFIXES = ("rotary_emb.inv_freq",)

#: Weights that aren't in the checkpoint: the loader makes them (`engine/models/rope.py`).
ROPE_COS, ROPE_SIN = "rope.cos", "rope.sin"


def build(config: ModelConfig, dtype: DType) -> Program:
    """The program of a config, computing in `dtype`; its weights carry the checkpoint's names."""
    return _Decoder(config, dtype).program()


class _Decoder:
    """One build: the config, the tables so far, and the buffers that all layers share."""

    def __init__(self, config: ModelConfig, dtype: DType) -> None:
        self.config = config
        self.dtype = dtype
        self.builder = ProgramBuilder()
        self.q_width = config.num_heads * config.head_dim
        self.kv_width = config.num_kv_heads * config.head_dim
        buffer = self.builder.buffer
        self.hidden = buffer("hidden", config.hidden_size, dtype)
        self.normed = buffer("normed", config.hidden_size, dtype)
        self.qkv = buffer("qkv", self.q_width + 2 * self.kv_width, dtype)
        self.mixed = buffer("mixed", self.q_width, dtype)
        self.gate_up = buffer("gate_up", 2 * config.intermediate_size, dtype)
        self.unit = buffer("unit", config.intermediate_size, dtype)
        self.update = buffer("update", config.hidden_size, dtype)
        self.selected = buffer("selected", config.hidden_size, dtype, Rows.LOGITS)
        self.selected_normed = buffer("selected_normed", config.hidden_size, dtype, Rows.LOGITS)
        self.logits = buffer("logits", config.vocab_size, DType.FLOAT32, Rows.LOGITS)
        table = (config.max_position_embeddings, config.head_dim // 2)
        self.cos = self.builder.weight(ROPE_COS, table, DType.FLOAT32)
        self.sin = self.builder.weight(ROPE_SIN, table, DType.FLOAT32)

    def program(self) -> Program:
        config, b = self.config, self.builder
        vocabulary = (config.vocab_size, config.hidden_size)
        embedding = b.weight("model.embed_tokens.weight", vocabulary, self.dtype)
        head = embedding if config.tie_word_embeddings else b.weight("lm_head.weight", vocabulary, self.dtype)
        b.add(Embed(embedding, self.hidden))
        for layer in range(config.num_layers):
            self._attention(layer)
            self._mlp(layer)
        b.add(SelectRows(self.hidden, self.selected))
        self._norm("model.norm", self.selected, self.selected_normed)
        b.add(LmHead(self.selected_normed, head, self.logits))
        spec = KVCacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, self.dtype)
        return b.build(spec, config.vocab_size, config.max_position_embeddings, self.dtype, self.logits)

    def _attention(self, layer: int) -> None:
        config, b = self.config, self.builder
        prefix = f"model.layers.{layer}"
        self._norm(f"{prefix}.input_layernorm", self.hidden, self.normed)
        parts = {"q_proj": self.q_width, "k_proj": self.kv_width, "v_proj": self.kv_width}
        self._linear(f"{prefix}.self_attn", parts, self.normed, self.qkv, config.qkv_bias)
        if config.qk_norm:
            self._head_norm(f"{prefix}.self_attn.q_norm", 0, config.num_heads)
            self._head_norm(f"{prefix}.self_attn.k_norm", config.num_heads, config.num_kv_heads)
        b.add(RopeStore(self.qkv, self.cos, self.sin, layer, config.num_heads))
        scale = config.head_dim**-0.5
        b.add(Attention(self.qkv, self.mixed, layer, config.num_heads, scale, config.windows[layer]))
        parts = {"o_proj": config.hidden_size}
        self._linear(f"{prefix}.self_attn", parts, self.mixed, self.update, config.o_bias)
        b.add(Add(self.hidden, self.update, self.hidden))

    def _mlp(self, layer: int) -> None:
        config, b = self.config, self.builder
        prefix = f"model.layers.{layer}"
        self._norm(f"{prefix}.post_attention_layernorm", self.hidden, self.normed)
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self._linear(f"{prefix}.mlp", parts, self.normed, self.gate_up, config.mlp_bias)
        b.add(ActivationMul(self.gate_up, self.unit, Activation.SILU))
        self._linear(f"{prefix}.mlp", {"down_proj": config.hidden_size}, self.unit, self.update, config.mlp_bias)
        b.add(Add(self.hidden, self.update, self.hidden))

    def _norm(self, name: str, x: int, out: int) -> None:
        weight = self.builder.weight(f"{name}.weight", (self.config.hidden_size,), self.dtype)
        self.builder.add(RmsNorm(x, weight, out, self.config.rms_norm_eps))

    def _head_norm(self, name: str, first_head: int, heads: int) -> None:
        weight = self.builder.weight(f"{name}.weight", (self.config.head_dim,), self.dtype)
        self.builder.add(HeadNorm(self.qkv, weight, first_head, heads, self.config.rms_norm_eps))

    def _linear(self, prefix: str, parts: dict[str, int], x: int, out: int, has_bias: bool) -> None:
        """Projections `parts` (name → output columns) of `x`, side by side in `out`."""
        b = self.builder
        name = f"{prefix}.{'+'.join(parts)}"
        rows = sum(parts.values())
        sources = {f"{prefix}.{part}.weight": width for part, width in parts.items()}
        weight = b.weight(f"{name}.weight", (rows, b.buffers[x].width), self.dtype, sources)
        bias = NONE
        if has_bias:
            sources = {f"{prefix}.{part}.bias": width for part, width in parts.items()}
            bias = b.weight(f"{name}.bias", (rows,), self.dtype, sources)
        b.add(Linear(x, weight, bias, out))
