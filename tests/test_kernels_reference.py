"""Ops of the reference backend one by one, against the formulas of `kernels/program.py`, and the ids of a backend."""

from __future__ import annotations

import inspect
from typing import get_args

import numpy as np
import pytest
import torch

from batonq.kernels import attention, linear, probe, program
from batonq.kernels.errors import WeightMismatch
from batonq.kernels.program import NONE, DType, Embed, HeadNorm, KVCacheSpec, LmHead, ProgramBuilder, Rows, SelectRows
from batonq.kernels.reference import ReferenceBackend
from tests.support.batches import Piece, forward, make_batch


def probe_tensors(dtype: DType) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values) for name, values in probe.weights(dtype).items()}


def attention_by_the_formula(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int, scale: float, window: int
) -> torch.Tensor:
    """One token: queries [q_heads, d] over keys and values [positions, kv_heads, d], in float64."""
    first = max(0, position + 1 - window) if window else 0
    group = queries.shape[0] // keys.shape[1]
    k, v = (x[first : position + 1].double().repeat_interleave(group, dim=1) for x in (keys, values))
    weights = torch.softmax(torch.einsum("hd,thd->ht", queries.double(), k) * scale, dim=1)
    return torch.einsum("ht,thd->hd", weights, v)


@pytest.mark.parametrize("window", [0, 1, 5, 32, 45])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_attention_is_the_formula_whatever_stale_slots_hold(q_heads: int, kv_heads: int, window: int) -> None:
    spans = [(0, 70), (33, 34), (63, 64), (64, 66), (0, 1), (10, 100), (31, 32)]
    generator = torch.Generator().manual_seed(q_heads + window)
    keys = torch.full((40, kv_heads, 32, 8), torch.nan)
    values = keys.clone()
    free = np.random.default_rng(3).permutation(40).tolist()
    pieces, histories = [], []
    for start, end in spans:
        blocks = [free.pop() for _ in range(-(-end // 32))]
        history = torch.randn(2, end, kv_heads, 8, generator=generator)
        for position in range(end):
            keys[blocks[position // 32], :, position % 32] = history[0, position]
            values[blocks[position // 32], :, position % 32] = history[1, position]
        pieces.append(Piece([0] * end, start, end, blocks))
        histories.append(history)
    batch = make_batch(pieces)
    queries = torch.randn(len(batch.token_ids), q_heads, 8, generator=generator)
    seen = []
    for tile in attention.plan(batch, 32, window):
        mixed = attention.attend(tile, queries, keys, values, 0.3)
        for row, heads in zip(tile.rows.flatten().tolist(), mixed.flatten(0, 1), strict=True):
            sequence = int(np.searchsorted(batch.query_start, row, side="right")) - 1
            position = int(batch.positions[row])
            known_keys, known_values = histories[sequence]
            expected = attention_by_the_formula(queries[row], known_keys, known_values, position, 0.3, window)
            torch.testing.assert_close(heads.double(), expected, atol=1e-5, rtol=1e-5)
            seen.append(row)
    assert sorted(seen) == list(range(len(batch.token_ids)))


def test_head_norm_touches_its_heads_only() -> None:
    b = ProgramBuilder()
    qkv = b.buffer("qkv", 4 * 8, DType.FLOAT32)
    chosen = b.buffer("chosen", 4 * 8, DType.FLOAT32, Rows.LOGITS)
    logits = b.buffer("logits", 4 * 8, DType.FLOAT32, Rows.LOGITS)
    b.add(Embed(b.weight("embedding", (5, 32), DType.FLOAT32), qkv))
    b.add(HeadNorm(qkv, b.weight("norm", (8,), DType.FLOAT32), first_head=1, heads=2, eps=1e-6))
    b.add(SelectRows(qkv, chosen))
    b.add(LmHead(chosen, b.weight("identity", (32, 32), DType.FLOAT32), logits))
    built = b.build(KVCacheSpec(1, 1, 8, DType.FLOAT32), 32, 16, DType.FLOAT32, logits)
    generator = torch.Generator().manual_seed(0)
    embedding, norm = torch.randn(5, 32, generator=generator), torch.randn(8, generator=generator)
    backend = ReferenceBackend(built, {"embedding": embedding, "norm": norm, "identity": torch.eye(32)}, 1)
    got = forward(backend, make_batch([Piece([3, 1], 0, 2, [0])])).view(2, 4, 8)
    expected = embedding[[3, 1]].view(2, 4, 8).clone()
    middle = expected[:, 1:3]
    expected[:, 1:3] = middle / (middle.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm
    torch.testing.assert_close(got, expected)
    assert torch.equal(forward(backend, make_batch([Piece([3], 0, 1, [0])]))[0].view(4, 8)[0], embedding[3, :8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "columns"), [(576, 96), (1536, 50), (37, 131)])
def test_a_linear_row_does_not_depend_on_the_others(dtype: torch.dtype, width: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias, x = (
        torch.randn(*s, generator=generator).to(dtype) for s in ((columns, width), (columns,), (70, width))
    )
    layer = linear.PackedLinear(weight, bias)
    whole = layer(x)
    tolerance = 1e-3 if dtype is torch.float32 else 0.5
    torch.testing.assert_close(
        whole.double(), x.double() @ weight.double().T + bias.double(), atol=tolerance, rtol=0.01
    )
    for rows in (1, 2, 3, 5, 17, 64):
        assert torch.equal(layer(x[70 - rows :]), whole[70 - rows :])
    assert layer(x[:0]).shape == (0, columns)


def test_op_codes_are_fixed_and_complete() -> None:
    codes = {op.__name__: int(op.code) for op in get_args(program.Op)}
    assert codes == {
        "Embed": 1,
        "RmsNorm": 2,
        "HeadNorm": 3,
        "Linear": 4,
        "RopeStore": 5,
        "Attention": 6,
        "ActivationMul": 7,
        "Add": 8,
        "SelectRows": 9,
        "LmHead": 10,
        "LinearAdd": 11,
        "LinearActivationMul": 12,
    }
    assert {field for op in get_args(program.Op) for field in inspect.get_annotations(op).values()} == {
        "ClassVar[OpCode]",
        "int",
        "float",
        "Activation",
    }
    assert (int(DType.FLOAT32), int(DType.BFLOAT16), NONE) == (0, 1, -1)


def test_cache_spec_counts_the_bytes_of_a_block() -> None:
    spec = KVCacheSpec(layers=30, kv_heads=3, head_dim=64, dtype=DType.BFLOAT16)
    assert spec.bytes_per_block == 32 * 22.5 * 1024
    backend = ReferenceBackend(probe.program(DType.FLOAT32), probe_tensors(DType.FLOAT32), 3)
    stored = backend.keys.nbytes + backend.values.nbytes
    assert stored == 3 * backend.program.kv_cache.bytes_per_block
    assert not backend.keys.any()
    assert not backend.values.any()


def test_ids_name_dtype_and_layout() -> None:
    ids = set()
    for dtype in DType:
        first, second = (ReferenceBackend(probe.program(dtype), probe_tensors(dtype), 3) for _ in range(2))
        assert first.numerics_id == second.numerics_id
        assert first.numerics_id.startswith(f"{dtype.label}-torch-")
        assert first.layout_id == f"plain-{dtype.label}-1x2x32x32"
        ids.add(first.numerics_id)
    assert len(ids) == 2


def test_a_weight_that_does_not_fit_is_named() -> None:
    weights = probe_tensors(DType.FLOAT32)
    with pytest.raises(WeightMismatch, match="weight down is missing"):
        ReferenceBackend(probe.program(DType.FLOAT32), {k: v for k, v in weights.items() if k != "down"}, 1)
    with pytest.raises(WeightMismatch, match=r"weight o has shape \[3, 3\]"):
        ReferenceBackend(probe.program(DType.FLOAT32), weights | {"o": torch.zeros(3, 3)}, 1)
