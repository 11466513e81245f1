"""The compiled CPU backend: close to the reference, and bitwise the same whatever runs beside, before or around it."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from batonq.kernels import probe
from batonq.kernels.cpu_backend import CpuBackend, why_not
from batonq.kernels.cpu_library import best_isa
from batonq.kernels.errors import BackendUnavailable
from batonq.kernels.packed import PackedWeights
from batonq.kernels.program import (
    BLOCK_SIZE,
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
from batonq.kernels.reference import ReferenceBackend
from tests.support import bits
from tests.support.batches import Piece, blocks_of, forward, make_batch
from tests.support.isas import ISAS, skip_without

NUM_BLOCKS = 64
MAX_POSITIONS = 160


def program(dtype: DType, *, head_dim: int = 32, kv_heads: int = 2, group: int = 3, window: int = 0) -> Program:
    """Two layers with every op there is, and sizes that divide nothing: 37 columns, 51 units, 131 tokens, biases.

    From the second layer's attention on only the rows with logits are computed.
    """
    b = ProgramBuilder()
    q_heads = kv_heads * group
    width, units, vocab = 37, 51, 131
    qkv_width = (q_heads + 2 * kv_heads) * head_dim
    widths = {"x": width, "normed": width, "qkv": qkv_width, "mixed": q_heads * head_dim, "gated": 2 * units}
    widths |= {"unit": units, "update": width}
    tokens, chosen = (
        {name: b.buffer(f"{rows.name} {name}", columns, dtype, rows) for name, columns in widths.items()}
        for rows in (Rows.TOKENS, Rows.LOGITS)
    )
    logits = b.buffer("logits", vocab, DType.FLOAT32, Rows.LOGITS)
    cos, sin = (b.weight(name, (MAX_POSITIONS, head_dim // 2), DType.FLOAT32) for name in ("cos", "sin"))
    embedding = b.weight("embedding", (vocab, width), dtype)
    b.add(Embed(embedding, tokens["x"]))
    for layer, rows in enumerate((tokens, chosen)):

        def matrix(name: str, rows: int, columns: int, layer: int = layer) -> int:
            return b.weight(f"{layer}.{name}", (rows, columns), dtype)

        qkv = tokens["qkv"]
        b.add(RmsNorm(tokens["x"], b.weight(f"{layer}.norm", (width,), dtype), tokens["normed"], 1e-5))
        bias = b.weight(f"{layer}.bias", (qkv_width,), dtype)
        b.add(Linear(tokens["normed"], matrix("qkv", qkv_width, width), bias, qkv))
        b.add(HeadNorm(qkv, b.weight(f"{layer}.q_norm", (head_dim,), dtype), 0, q_heads, 1e-6))
        b.add(HeadNorm(qkv, b.weight(f"{layer}.k_norm", (head_dim,), dtype), q_heads, kv_heads, 1e-6))
        b.add(RopeStore(qkv, cos, sin, layer, q_heads))
        if rows is chosen:
            b.add(SelectRows(tokens["x"], chosen["x"]))
            b.add(SelectRows(qkv, chosen["qkv"]))
        b.add(Attention(rows["qkv"], rows["mixed"], layer, q_heads, head_dim**-0.5, window))
        b.add(Linear(rows["mixed"], matrix("o", width, q_heads * head_dim), NONE, rows["update"]))
        b.add(Add(rows["x"], rows["update"], rows["x"]))
        b.add(Linear(rows["x"], matrix("gate_up", 2 * units, width), NONE, rows["gated"]))
        b.add(ActivationMul(rows["gated"], rows["unit"], Activation.SILU))
        b.add(Linear(rows["unit"], matrix("down", width, units), NONE, rows["update"]))
        b.add(Add(rows["x"], rows["update"], rows["x"]))
    b.add(LmHead(chosen["x"], embedding, logits))
    return b.build(KVCacheSpec(2, kv_heads, head_dim, dtype), vocab, MAX_POSITIONS, dtype, logits)


def weights(built: Program) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    # Scaled by the length of a sum, so that values stay near 1 through the layers.
    made = {w.name: torch.randn(w.shape, generator=generator) * w.shape[-1] ** -0.5 for w in built.weights}
    for name in (name for name in made if "norm" in name):
        made[name] = 1.0 + made[name]
    angles = torch.outer(torch.arange(MAX_POSITIONS), 100.0 ** -torch.linspace(0, 1, made["cos"].shape[1]))
    return made | {"cos": angles.cos(), "sin": angles.sin()}


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    skip_without(name)
    return name


def compiled(built: Program, isa: str, threads: int = 2, tensors: dict[str, torch.Tensor] | None = None) -> CpuBackend:
    arrays = {name: tensor.float().numpy() for name, tensor in (tensors or weights(built)).items()}
    return CpuBackend(built, PackedWeights.pack(built, arrays.get), NUM_BLOCKS, threads, isa)


def compiled_probe(dtype: DType, isa: str) -> CpuBackend:
    built = probe.program(dtype)
    return CpuBackend(built, PackedWeights.pack(built, probe.weights(dtype).get), 3, 2, isa)


def alone(backend: CpuBackend | ReferenceBackend, tokens: list[int]) -> torch.Tensor:
    """Logits at all positions of a sequence that is computed at once."""
    return forward(backend, make_batch([Piece(tokens, 0, len(tokens), list(range(blocks_of(len(tokens)))))]))


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"window": 20},
        {"window": 1},
        {"head_dim": 16, "group": 1, "kv_heads": 3},
        {"head_dim": 80, "group": 5, "kv_heads": 1},
        {"head_dim": 128, "group": 8, "kv_heads": 1, "window": 45},
    ],
    ids=str,
)
def test_it_computes_what_the_reference_does(isa: str, dtype: DType, shape: dict[str, int]) -> None:
    built = program(dtype, **shape)
    backend = compiled(built, isa)
    bits.dirty(backend)
    tokens = random.Random(1).choices(range(131), k=101)
    got = alone(backend, tokens)
    reference = alone(ReferenceBackend(built, weights(built), NUM_BLOCKS), tokens)
    if dtype is DType.FLOAT32:
        torch.testing.assert_close(got, reference, atol=1e-5 * reference.std().item(), rtol=1e-4)
        return
    # bf16 rounds after each op, and sums in another order than the reference: neither may be much further off.
    exact = program(DType.FLOAT32, **shape)
    truth = alone(ReferenceBackend(exact, weights(exact), NUM_BLOCKS), tokens)
    ours, theirs = (got - truth).abs(), (reference - truth).abs()
    assert ours.max() < 2 * theirs.max()
    assert ours.mean() < 1.2 * theirs.mean()


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_bits_depend_on_the_sequence_alone(isa: str, dtype: DType, window: int, threads: int) -> None:
    """Any chunks, any neighbours, any blocks, dirty tails, any number of threads; prefill gives decode's bits."""
    chance = random.Random(threads)
    built = program(dtype, window=window)
    sequences = [chance.choices(range(131), k=chance.randint(1, 140)) for _ in range(9)]
    single = compiled(built, isa, 1)
    expected = [bits.alone(single, tokens) for tokens in sequences]
    backend = compiled(built, isa, threads)
    assert bits.differences(bits.together(backend, sequences, chance, NUM_BLOCKS), expected) == []


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("threads", [2, 3, 4])
def test_blocks_may_be_read_in_the_step_that_fills_them(isa: str, dtype: DType, threads: int) -> None:
    """By sequences before and behind the one that does so, in rows of other threads."""
    chance = random.Random(threads)
    built = program(dtype)
    prefix = chance.choices(range(131), k=2 * BLOCK_SIZE)
    single, backend = compiled(built, isa, 1), compiled(built, isa, threads)
    tails = [chance.choices(range(131), k=chance.choice((1, 1, 2, 9, 40))) for _ in range(24)]
    expected = [alone(single, [*prefix, *tail])[len(prefix) :] for tail in tails]
    pieces = [
        Piece([*prefix, *tail], len(prefix), len(prefix) + len(tail), [0, 1, 2 * i + 2, 2 * i + 3])
        for i, tail in enumerate(tails)
    ]
    for place in (0, len(tails) // 2, len(tails) - 1):
        bits.dirty(backend)
        # The one at this place computes the prefix too.
        pieces[place] = replace(pieces[place], start=0)
        got = forward(backend, make_batch(pieces)).split([piece.end - piece.start for piece in pieces])
        pieces[place] = replace(pieces[place], start=len(prefix))
        for i, (rows, tail) in enumerate(zip(got, tails, strict=True)):
            assert torch.equal(rows[-len(tail) :], expected[i]), (place, i)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("window", [0, 20])
def test_logits_of_any_rows_in_any_order(isa: str, dtype: DType, window: int) -> None:
    """Those that are wanted are what they'd be if all were, whether a sequence has none of them, one or several."""
    chance = random.Random(7)
    built = program(dtype, window=window)
    pieces = [
        Piece(chance.choices(range(131), k=length), 0, length, [2 * i, 2 * i + 1, 2 * i + 20])
        for i, length in enumerate((70, 1, 33, 5, 64, 2, 90))
    ]
    batch = make_batch(pieces)
    for backend in (compiled(built, isa), ReferenceBackend(built, weights(built), NUM_BLOCKS)):
        expected = forward(backend, batch)
        for count in (0, 1, 5, 9, 60):
            rows = np.array(chance.choices(range(70 + 1 + 33), k=count), np.int32)
            assert torch.equal(forward(backend, replace(batch, logits_rows=rows)), expected[rows])


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_are_not_hurt_by_those_behind_them(isa: str, dtype: DType, window: int, bad: float) -> None:
    """A token whose keys and values are no numbers: computed behind others in one step, as a wrong guess is."""
    built = program(dtype, window=window)
    broken = weights(built)
    broken["embedding"][77] = bad
    for backend in (compiled(built, isa, tensors=broken), ReferenceBackend(built, broken, NUM_BLOCKS)):
        for length in (1, 2, 5, 31, 32, 33, 70, 101):
            tokens = random.Random(length).choices(range(77), k=length)
            whole = alone(backend, [*tokens, 77, 77, 5])
            assert whole[length:].isnan().any(dim=1).all()
            for start in (0, length - 1):
                forward(backend, make_batch([Piece(tokens, 0, max(1, start), range(4))]))
                got = forward(backend, make_batch([Piece([*tokens, 77, 77, 5], start, length + 3, range(4))]))
                expected = alone(backend, tokens)[start:]
                assert not expected[:, :77].isnan().any()
                assert torch.equal(got[: length - start, :77], expected[:, :77]), (length, start)


def test_a_query_only_row_reads_and_does_not_store(isa: str) -> None:
    built = program(DType.BFLOAT16)
    backend = compiled(built, isa)
    tokens = list(range(64))
    expected = alone(backend, tokens)
    before = [memory.copy() for memory in backend.cache_bytes()]
    got = forward(backend, make_batch([Piece(tokens, 63, 64, [0, 1], query_only=True)]))
    assert torch.equal(got[0], expected[63])
    for memory, kept in zip(backend.cache_bytes(), before, strict=True):
        assert np.array_equal(memory, kept)


def test_no_row_and_no_logits(isa: str) -> None:
    built = program(DType.FLOAT32)
    backend = compiled(built, isa)
    quiet = forward(backend, make_batch([Piece([5, 6], 0, 2, [3], logits=False)]))
    assert quiet.shape == (0, 131)


def test_a_vocabulary_of_152k(isa: str) -> None:
    b = ProgramBuilder()
    x = b.buffer("x", 16, DType.BFLOAT16)
    chosen = b.buffer("chosen", 16, DType.BFLOAT16, Rows.LOGITS)
    logits = b.buffer("logits", 151_936, DType.FLOAT32, Rows.LOGITS)
    embedding = b.weight("embedding", (151_936, 16), DType.BFLOAT16)
    b.add(Embed(embedding, x))
    b.add(SelectRows(x, chosen))
    b.add(LmHead(chosen, embedding, logits))
    built = b.build(KVCacheSpec(1, 1, 16, DType.BFLOAT16), 151_936, 8, DType.BFLOAT16, logits)
    table = torch.randn(151_936, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = forward(compiled(built, isa, tensors={"embedding": table}), make_batch([Piece([151_935, 7], 0, 2, [0])]))
    torch.testing.assert_close(got.double(), table[[151_935, 7]].double() @ table.double().T, atol=1e-4, rtol=1e-4)


def test_the_numerics_id_names_the_instruction_set(isa: str) -> None:
    first, second = (compiled_probe(dtype, isa).numerics_id for dtype in DType)
    assert first.startswith(f"float32-{isa}-4-")
    assert second.startswith(f"bfloat16-{isa}-4-")


def test_what_it_cannot_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not(program(DType.FLOAT32)) is None
    odd = program(DType.FLOAT32, head_dim=24)
    assert why_not(odd) == "head_dim is 24, not a multiple of 16 up to 256"
    with pytest.raises(BackendUnavailable, match="head_dim is 24"):
        compiled(odd, best_isa())
    monkeypatch.setenv("BATONQ_CPU_ISA", "sse9")
    assert best_isa() == "sse9"
    with pytest.raises(BackendUnavailable, match="no instruction set sse9 here"):
        compiled(program(DType.FLOAT32), best_isa())
