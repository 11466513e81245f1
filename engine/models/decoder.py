"""The dense decoder as a program: pre-norm attention and gated MLP, which `families.py` varies.

Source: transformers' `modeling_llama.py` and, for QK norm and windows, `modeling_qwen3.py`. Projections that read the
same input are joined into one weight.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class _Activations:
    """The buffers of a layer for one kind of rows; all layers share them."""

    hidden: int
    normed: int
    qkv: int
    mixed: int
    gate_up: int
    unit: int
    update: int


class _Decoder:
    """One build: the config, the tables so far, and the buffers."""

    def __init__(self, config: ModelConfig, dtype: DType) -> None:
        self.config = config
        self.dtype = dtype
        self.builder = ProgramBuilder()
        self.q_width = config.num_heads * config.head_dim
        self.kv_width = config.num_kv_heads * config.head_dim
        self.tokens = self._activations("", Rows.TOKENS)
        self.selected = self._activations("selected_", Rows.LOGITS)
        self.logits = self.builder.buffer("logits", config.vocab_size, DType.FLOAT32, Rows.LOGITS)
        table = (config.max_position_embeddings, config.head_dim // 2)
        self.cos = self.builder.weight(ROPE_COS, table, DType.FLOAT32)
        self.sin = self.builder.weight(ROPE_SIN, table, DType.FLOAT32)

    def _activations(self, prefix: str, rows: Rows) -> _Activations:
        config = self.config
        widths = {
            "hidden": config.hidden_size,
            "normed": config.hidden_size,
            "qkv": self.q_width + 2 * self.kv_width,
            "mixed": self.q_width,
            "gate_up": 2 * config.intermediate_size,
            "unit": config.intermediate_size,
            "update": config.hidden_size,
        }
        return _Activations(**{k: self.builder.buffer(prefix + k, w, self.dtype, rows) for k, w in widths.items()})

    def program(self) -> Program:
        """All rows go through all layers but the last, where what nobody will read isn't computed: there the rows
        without logits leave keys and values behind, and nothing else.
        """
        config, b = self.config, self.builder
        vocabulary = (config.vocab_size, config.hidden_size)
        embedding = b.weight("model.embed_tokens.weight", vocabulary, self.dtype)
        head = embedding if config.tie_word_embeddings else b.weight("lm_head.weight", vocabulary, self.dtype)
        rows = self.tokens
        b.add(Embed(embedding, rows.hidden))
        for layer in range(config.num_layers):
            self._project(layer)
            if layer == config.num_layers - 1:
                b.add(SelectRows(self.tokens.hidden, self.selected.hidden))
                b.add(SelectRows(self.tokens.qkv, self.selected.qkv))
                rows = self.selected
            self._attention(layer, rows)
            self._mlp(layer, rows)
        self._norm("model.norm", rows.hidden, rows.normed)
        b.add(LmHead(rows.normed, head, self.logits))
        spec = KVCacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, self.dtype)
        return b.build(spec, config.vocab_size, config.max_position_embeddings, self.dtype, self.logits)

    def _project(self, layer: int) -> None:
        """Queries, keys and values of all rows; keys and values go to the blocks."""
        config, rows = self.config, self.tokens
        prefix = f"model.layers.{layer}"
        self._norm(f"{prefix}.input_layernorm", rows.hidden, rows.normed)
        parts = {"q_proj": self.q_width, "k_proj": self.kv_width, "v_proj": self.kv_width}
        self._linear(f"{prefix}.self_attn", parts, rows.normed, rows.qkv, config.qkv_bias)
        if config.qk_norm:
            self._head_norm(f"{prefix}.self_attn.q_norm", 0, config.num_heads)
            self._head_norm(f"{prefix}.self_attn.k_norm", config.num_heads, config.num_kv_heads)
        self.builder.add(RopeStore(rows.qkv, self.cos, self.sin, layer, config.num_heads))

    def _attention(self, layer: int, rows: _Activations) -> None:
        config, b = self.config, self.builder
        scale = config.head_dim**-0.5
        b.add(Attention(rows.qkv, rows.mixed, layer, config.num_heads, scale, config.windows[layer]))
        parts = {"o_proj": config.hidden_size}
        self._linear(f"model.layers.{layer}.self_attn", parts, rows.mixed, rows.update, config.o_bias)
        b.add(Add(rows.hidden, rows.update, rows.hidden))

    def _mlp(self, layer: int, rows: _Activations) -> None:
        config, b = self.config, self.builder
        prefix = f"model.layers.{layer}"
        self._norm(f"{prefix}.post_attention_layernorm", rows.hidden, rows.normed)
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self._linear(f"{prefix}.mlp", parts, rows.normed, rows.gate_up, config.mlp_bias)
        b.add(ActivationMul(rows.gate_up, rows.unit, Activation.SILU))
        self._linear(f"{prefix}.mlp", {"down_proj": config.hidden_size}, rows.unit, rows.update, config.mlp_bias)
        b.add(Add(rows.hidden, rows.update, rows.hidden))

    def _norm(self, name: str, x: int, out: int) -> None:
        weight = self.builder.weight(f"{name}.weight", (self.config.hidden_size,), self.dtype)
        self.builder.add(RmsNorm(x, weight, out, self.config.rms_norm_eps))

    def _head_norm(self, name: str, first_head: int, heads: int) -> None:
        weight = self.builder.weight(f"{name}.weight", (self.config.head_dim,), self.dtype)
        self.builder.add(HeadNorm(self.tokens.qkv, weight, first_head, heads, self.config.rms_norm_eps))

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
