"""Fused ops: joined only where nobody else reads what is passed on, and with the bits of the two ops they stand for."""

from __future__ import annotations

import numpy as np
import pytest

from batonq.kernels.cpu_backend import CpuBackend
from batonq.kernels.fusion import fuse
from batonq.kernels.packed import PackedWeights
from batonq.kernels.program import (
    NONE,
    Activation,
    ActivationMul,
    Add,
    DType,
    Embed,
    KVCacheSpec,
    Linear,
    LinearActivationMul,
    LinearAdd,
    LmHead,
    Program,
    ProgramBuilder,
    Rows,
    SelectRows,
)
from tests.support.batches import Piece, make_batch
from tests.support.isas import ISAS, skip_without

VOCAB, WIDTH = 70, 45


def mlp(dtype: DType, units: int, *, bias: bool, read_on: bool) -> Program:
    """Embedding, a gated MLP with its residual, LM head. `read_on`: other ops read what a fused op wouldn't write."""
    b = ProgramBuilder()
    hidden, update, spare = (b.buffer(name, WIDTH, dtype) for name in ("hidden", "update", "spare"))
    gate_up, spare_units = (b.buffer(name, 2 * units, dtype) for name in ("gate_up", "spare_units"))
    unit = b.buffer("unit", units, dtype)
    chosen = b.buffer("chosen", WIDTH, dtype, Rows.LOGITS)
    logits = b.buffer("logits", VOCAB, DType.FLOAT32, Rows.LOGITS)
    embedding = b.weight("embedding", (VOCAB, WIDTH), dtype)
    biases = [b.weight(name, (width,), dtype) for name, width in (("b0", 2 * units), ("b1", WIDTH)) if bias]
    b.add(Embed(embedding, hidden))
    b.add(Linear(hidden, b.weight("gate_up", (2 * units, WIDTH), dtype), biases[0] if bias else NONE, gate_up))
    b.add(ActivationMul(gate_up, unit, Activation.SILU))
    b.add(Linear(unit, b.weight("down", (WIDTH, units), dtype), biases[1] if bias else NONE, update))
    b.add(Add(hidden, update, hidden))
    if read_on:
        b.add(Add(gate_up, gate_up, spare_units))
        b.add(Add(update, update, spare))
    b.add(SelectRows(hidden, chosen))
    b.add(LmHead(chosen, embedding, logits))
    return b.build(KVCacheSpec(1, 1, 16, dtype), VOCAB, 64, dtype, logits)


def logits(program: Program, isa: str, rows: int) -> np.ndarray:
    chance = np.random.default_rng(3)
    tensors = {w.name: chance.standard_normal(w.shape, np.float32) * 0.3 for w in program.weights}
    backend = CpuBackend(program, PackedWeights.pack(program, tensors.get), 4, 2, isa)
    tokens = [int(token) for token in chance.integers(0, VOCAB, rows)]
    return backend.forward(make_batch([Piece(tokens, 0, rows, [0, 1])])).values.copy()


def test_a_result_that_is_only_passed_on_is_not_written() -> None:
    program = mlp(DType.BFLOAT16, 51, bias=True, read_on=False)
    kinds = [type(op) for op in fuse(program).ops]
    assert kinds == [Embed, LinearActivationMul, LinearAdd, SelectRows, LmHead]


def test_a_result_that_others_read_is_written() -> None:
    program = mlp(DType.BFLOAT16, 51, bias=True, read_on=True)
    assert fuse(program) == program


def test_a_product_is_not_added_to_its_own_input() -> None:
    program = mlp(DType.FLOAT32, 51, bias=False, read_on=False)
    hidden, update = program.ops[0].out, program.ops[3].out
    onto_itself = Program(
        (Linear(hidden, program.ops[3].weight, NONE, update), Add(hidden, update, hidden)),
        program.buffers,
        program.weights,
        program.kv_cache,
        VOCAB,
        64,
        program.dtype,
        program.output,
    )
    assert fuse(onto_itself) == onto_itself


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize(("units", "bias"), [(32, False), (51, True), (16, True), (97, False)])
@pytest.mark.parametrize("rows", [1, 7, 50])
def test_fused_ops_have_the_bits_of_the_two(isa: str, dtype: DType, units: int, bias: bool, rows: int) -> None:
    skip_without(isa)
    fused, apart = (logits(mlp(dtype, units, bias=bias, read_on=read_on), isa, rows) for read_on in (False, True))
    assert np.isfinite(fused).all()
    assert np.array_equal(fused.view(np.uint32), apart.view(np.uint32))
