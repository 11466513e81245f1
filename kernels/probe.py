"""A tiny fixed model whose logits' bits name a backend's arithmetic.

Two machines whose probes agree ran the same kernels in the same order on it; the digest is part of the numerics id.
Weights come from an integer recurrence, so that no random generator is part of the definition.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from batonq.kernels.batch import Batch
from batonq.kernels.logits import Logits
from batonq.kernels.program import (
    NONE,
    Activation,
    ActivationMul,
    Add,
    Attention,
    DType,
    Embed,
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

NUM_BLOCKS = 3
_VOCAB, _WIDTH, _HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, _POSITIONS = 64, 192, 512, 6, 2, 32, 64
_EPS = 1e-5


def program(dtype: DType) -> Program:
    """One layer with every kind of product: reductions over 192 and 512 columns, 40 positions in two blocks."""
    b = ProgramBuilder()
    qkv_width = (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM
    x, normed, qkv, mixed, projected, gated, unit, down = (
        b.buffer(name, width, dtype)
        for name, width in (
            ("x", _WIDTH),
            ("normed", _WIDTH),
            ("qkv", qkv_width),
            ("mixed", _WIDTH),
            ("projected", _WIDTH),
            ("gated", 2 * _HIDDEN),
            ("unit", _HIDDEN),
            ("down", _WIDTH),
        )
    )
    chosen = b.buffer("chosen", _WIDTH, dtype, Rows.LOGITS)
    logits = b.buffer("logits", _VOCAB, DType.FLOAT32, Rows.LOGITS)
    embedding = b.weight("embedding", (_VOCAB, _WIDTH), dtype)
    norm = b.weight("norm", (_WIDTH,), dtype)
    cos, sin = (b.weight(name, (_POSITIONS, _HEAD_DIM // 2), DType.FLOAT32) for name in ("cos", "sin"))
    b.add(Embed(embedding, x))
    b.add(RmsNorm(x, norm, normed, _EPS))
    b.add(Linear(normed, b.weight("qkv", (qkv_width, _WIDTH), dtype), NONE, qkv))
    b.add(RopeStore(qkv, cos, sin, 0, _HEADS))
    b.add(Attention(qkv, mixed, 0, _HEADS, _HEAD_DIM**-0.5, 0))
    b.add(Linear(mixed, b.weight("o", (_WIDTH, _WIDTH), dtype), NONE, projected))
    b.add(Add(x, projected, x))
    b.add(Linear(x, b.weight("gate_up", (2 * _HIDDEN, _WIDTH), dtype), NONE, gated))
    b.add(ActivationMul(gated, unit, Activation.SILU))
    b.add(Linear(unit, b.weight("down", (_WIDTH, _HIDDEN), dtype), NONE, down))
    b.add(Add(x, down, x))
    b.add(SelectRows(x, chosen))
    b.add(LmHead(chosen, embedding, logits))
    return b.build(KVCacheSpec(1, _KV_HEADS, _HEAD_DIM, dtype), _VOCAB, _POSITIONS, dtype, logits)


def weights(dtype: DType) -> dict[str, npt.NDArray[np.float32]]:
    """The weights of `program(dtype)`: multiples of 2⁻¹⁶ in [-0.5, 0.5), scrambled by Knuth's multiplier."""
    arrays = {}
    for salt, weight in enumerate(program(dtype).weights):
        count = int(np.prod(weight.shape))
        words = (np.arange(count, dtype=np.uint64) + np.uint64(salt << 20)) * np.uint64(2654435761)
        whole = (words >> np.uint64(16) & np.uint64(0xFFFF)).astype(np.float32)
        arrays[weight.name] = (whole * np.float32(2**-16) - np.float32(0.5)).reshape(weight.shape)
    return arrays


def digest(forward: Callable[[Batch], Logits]) -> str:
    """Twelve hex digits of BLAKE2b over the logits of a prefill of 39 tokens and a decode of one."""
    state = blake2b(digest_size=6)
    for start, end in ((0, 39), (39, 40)):
        count = end - start
        positions = np.arange(start, end, dtype=np.int32)
        batch = Batch(
            token_ids=(positions * 7 + 3) % _VOCAB,
            positions=positions,
            query_start=np.array([0, count], np.int32),
            context_len=np.array([end], np.int32),
            store_from=np.array([start], np.int32),
            block_tables=np.array([[2, 1]], np.int32),
            logits_rows=np.arange(count, dtype=np.int32),
        )
        state.update(forward(batch).values.astype("<f4").tobytes())
    return state.hexdigest()
