"""The screened LM head: the largest logit and its column as in the whole row of logits, whatever the numbers are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batonq.kernels import screen
from batonq.kernels.batch import Batch
from batonq.kernels.cpu_backend import SCREENING_ISAS, CpuBackend
from batonq.kernels.packed import PackedWeights
from batonq.kernels.program import DType, Embed, KVCacheSpec, LmHead, Program, ProgramBuilder, Rows, SelectRows
from batonq.kernels.reference import ReferenceBackend
from tests.support.isas import ISAS, skip_without

Float32 = npt.NDArray[np.float32]
Generator = np.random.Generator

WIDTHS = (1, 2, 3, 30, 42, 64, 72, 576)
VOCABULARIES = (1, 2, 63, 64, 65, 1000, 5000)
#: Around the tiles of 6 rows and the chunks of 126.
ROWS = (1, 2, 5, 6, 7, 12, 13, 64, 127)


def head(vocabulary: int, width: int, rows: int, dtype: DType) -> Program:
    """Logits of the rows of `x`, which may be anything."""
    b = ProgramBuilder()
    x, chosen = b.buffer("x", width, dtype), b.buffer("chosen", width, dtype, Rows.LOGITS)
    logits = b.buffer("logits", vocabulary, DType.FLOAT32, Rows.LOGITS)
    b.add(Embed(b.weight("x", (rows, width), dtype), x))
    b.add(SelectRows(x, chosen))
    b.add(LmHead(chosen, b.weight("head", (vocabulary, width), dtype), logits))
    return b.build(KVCacheSpec(1, 1, 16, dtype), vocabulary, 1, dtype, logits)


def batch(rows: int) -> Batch:
    every, one = np.arange(rows, dtype=np.int32), np.ones(rows, np.int32)
    return Batch(every, one * 0, np.arange(rows + 1, dtype=np.int32), one, one, (one * 0)[:, None], every)


def gaussian(chance: Generator, rows: int, width: int) -> Float32:
    return chance.standard_normal((rows, width)).astype(np.float32)


def with_outliers(chance: Generator, rows: int, width: int) -> Float32:
    """A few columns a hundred times as large, as models have them."""
    return gaussian(chance, rows, width) * np.where(chance.random(width) < 0.02, np.float32(100), np.float32(1))


def of_few(chance: Generator, rows: int, width: int) -> Float32:
    """Every row many times: the largest logit stands in many columns."""
    return gaussian(chance, 3, width)[chance.integers(0, 3, rows)]


def nearly_alike(chance: Generator, rows: int, width: int) -> Float32:
    """Rows that differ in few bits of one element."""
    alike = np.repeat(gaussian(chance, 1, width), rows, axis=0)
    alike[np.arange(rows), chance.integers(0, width, rows)] *= 1 + chance.integers(-3, 4, rows) * np.float32(2**-7)
    return alike


def zeros(chance: Generator, rows: int, width: int) -> Float32:
    return np.zeros((rows, width), np.float32) if chance.random() < 0.5 else -np.zeros((rows, width), np.float32)


def of_many_sizes(chance: Generator, rows: int, width: int) -> Float32:
    """From denormal to what overflows in a product."""
    return gaussian(chance, rows, width) * np.float32(10) ** chance.integers(-40, 36, (rows, 1)).astype(np.float32)


def tiny(chance: Generator, rows: int, width: int) -> Float32:
    """All so small that squares underflow, or that logits do."""
    return gaussian(chance, rows, width) * np.float32(10) ** np.float32(chance.integers(-44, -9))


def with_oddities(chance: Generator, rows: int, width: int) -> Float32:
    """Infinities and NaN here and there."""
    odd = gaussian(chance, rows, width)
    for value in (np.inf, -np.inf, np.nan):
        odd[chance.random(rows) < 0.05, chance.integers(0, width)] = value
    return odd


Kind = Callable[[Generator, int, int], Float32]
KINDS: tuple[Kind, ...] = (gaussian, with_outliers, of_few, nearly_alike, zeros, of_many_sizes, tiny, with_oddities)


def made(
    weights: dict[str, Float32], dtype: DType, threads: int, isa: str | None = None
) -> tuple[CpuBackend, PackedWeights]:
    (vocabulary, width), rows = weights["head"].shape, len(weights["x"])
    program = head(vocabulary, width, rows, dtype)
    packed = PackedWeights.pack(program, weights.get)
    return CpuBackend(program, packed, 1, threads, isa), packed


@pytest.mark.parametrize("isa", ISAS)
@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    width=st.sampled_from(WIDTHS),
    vocabulary=st.sampled_from(VOCABULARIES),
    rows=st.sampled_from(ROWS),
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    dtype=st.sampled_from(list(DType)),
    threads=st.integers(1, 4),
)
def test_the_largest_is_that_of_the_whole_row(
    isa: str,
    seed: int,
    width: int,
    vocabulary: int,
    rows: int,
    kinds: tuple[Kind, Kind],
    dtype: DType,
    threads: int,
) -> None:
    skip_without(isa)
    chance = np.random.default_rng(seed)
    weights = {"x": kinds[0](chance, rows, width), "head": kinds[1](chance, vocabulary, width)}
    backend, _ = made(weights, dtype, threads, isa)
    whole = backend.forward(batch(rows)).values.copy()
    greedy = int(chance.integers(1, rows + 1))
    found = backend.forward(replace(batch(rows), num_greedy=greedy))
    kept = rows - greedy
    assert np.array_equal(found.values.view(np.uint32), whole[:kept].view(np.uint32))
    with np.errstate(invalid="ignore"):
        largest = whole[kept:].max(axis=1)
    assert np.array_equal(found.largest, largest, equal_nan=True)
    known = ~np.isnan(largest)
    assert np.array_equal(found.largest_ids[known], whole[kept:].argmax(axis=1)[known])


@pytest.mark.parametrize("size", [1e-24, 1e-22, 1e-13, 1e-9, 1.0])
def test_digits_that_round_to_nothing_are_no_proof(size: float) -> None:
    """A digit misses up to half a unit; where squares underflow, it would seem to miss nothing."""
    signs = screen.rotate(np.eye(2, dtype=np.float32)).sum(axis=0)
    signs = np.where(signs == 0, np.float32(1), np.sign(signs))
    rows = [np.array([1.0039, 0.9961]), np.array([1.0039, -0.9961]), np.array([0.9961, 1.0039])]
    x = np.array([row * sign for row in rows for sign in (signs, -signs, 1, -1)], np.float32) * np.float32(size)
    directions = np.array([(1.002, 1.002), (2, 0), (0, 2), (1.002, -1.002)], np.float32)
    weights = {"x": x, "head": np.concatenate([directions, -directions])}
    backend, _ = made(weights, DType.FLOAT32, 1)
    whole = backend.forward(batch(len(x))).values.copy()
    found = backend.forward(replace(batch(len(x)), num_greedy=len(x)))
    assert np.array_equal(found.largest_ids, whole.argmax(axis=1))
    assert np.array_equal(found.largest, whole.max(axis=1))


@pytest.mark.parametrize("dtype", list(DType))
def test_the_reference_tells_the_same(dtype: DType) -> None:
    chance = np.random.default_rng(3)
    weights = {"x": gaussian(chance, 9, 72), "head": of_few(chance, 130, 72)}
    tensors = {name: torch.from_numpy(values) for name, values in weights.items()}
    reference = ReferenceBackend(head(130, 72, 9, dtype), tensors, 1)
    whole = reference.forward(batch(9)).values.copy()
    found = reference.forward(replace(batch(9), num_greedy=5))
    assert np.array_equal(found.values, whole[:4])
    assert np.array_equal(found.largest, whole[4:].max(axis=1))
    assert np.array_equal(found.largest_ids, whole[4:].argmax(axis=1))


@pytest.mark.parametrize("dtype", list(DType))
def test_the_screen_is_what_decides(dtype: DType) -> None:
    """Of a column whose digits and error are wiped out nothing is computed, be its logit the largest."""
    (isa,) = SCREENING_ISAS
    skip_without(isa)
    chance = np.random.default_rng(5)
    weights = {"x": gaussian(chance, 6, 64), "head": gaussian(chance, 640, 64)}
    backend, packed = made(weights, dtype, 1, isa)
    asked = replace(batch(6), num_greedy=6)
    before = backend.forward(asked).largest_ids.copy()
    assert packed.screen is not None
    start, rows, width = packed.screen
    floats_at = start + rows * width + 4 * rows  # behind digits and sums
    for column in before.tolist():
        for which in range(3):
            ctypes.memset(floats_at + 4 * (which * rows + column), 0, 4)
    assert not set(backend.forward(asked).largest_ids.tolist()) & set(before.tolist())


@given(seed=st.integers(0, 2**32), width=st.sampled_from(WIDTHS), rows=st.integers(1, 20))
def test_rotating_keeps_products(seed: int, width: int, rows: int) -> None:
    chance = np.random.default_rng(seed)
    a, b = with_outliers(chance, rows, width), gaussian(chance, rows, width)
    lengths = np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=1)[None]
    assert (np.abs(screen.rotate(a) @ screen.rotate(b).T - a @ b.T) <= 1e-5 * lengths).all()


@pytest.mark.parametrize("width", [576, 896, 2048])
def test_digits_miss_less_than_a_hundredth_of_what_has_outliers(width: int) -> None:
    weight = with_outliers(np.random.default_rng(7), 256, width)
    made_of = screen.make_screen(weight)
    scale, error, norm = made_of[256 * (width + 4) :][: 3 * 1024].view(np.float32).reshape(3, 256)
    assert (error < 0.01 * norm).all()
    assert np.allclose(norm, np.linalg.norm(weight, axis=1), rtol=1e-3)
    assert (scale > 0).all()


def test_a_weight_that_rotating_would_cost_more_than_it_saves_has_no_screen() -> None:
    assert screen.can_screen(49152, 576)
    assert screen.can_screen(151936, 5120)
    assert not screen.can_screen(49152, 2 * 127)
    assert not screen.can_screen(2**20, 2**11)
