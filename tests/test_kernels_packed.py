"""Packed weights: every bit where the library looks for it, and no file that isn't whole and the program's own."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from batonq.kernels import packed
from batonq.kernels.errors import WeightMismatch
from batonq.kernels.packed import PackedWeights, to_bfloat16
from batonq.kernels.program import NONE, DType, Embed, KVCacheSpec, Linear, Program, ProgramBuilder, RmsNorm

TORCH_DTYPE = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16}

#: Sizes that divide nothing, one weight above a page, one joined from two tensors.
SHAPES = {"embedding": (131, 37), "norm": (37,), "first": (5, 37), "second": (70, 37), "cos": (9, 3)}


def program(dtype: DType) -> Program:
    b = ProgramBuilder()
    x, y = b.buffer("x", 37, dtype), b.buffer("y", 75, dtype)
    b.add(Embed(b.weight("embedding", SHAPES["embedding"], dtype), x))
    b.add(RmsNorm(x, b.weight("norm", SHAPES["norm"], dtype), x, 1e-5))
    b.add(Linear(x, b.weight("joined", (75, 37), dtype, {"first": 5, "second": 70}), NONE, y))
    b.weight("cos", SHAPES["cos"], DType.FLOAT32)
    return b.build(KVCacheSpec(1, 1, 16, dtype), 131, 9, dtype, y)


def arrays() -> dict[str, packed.Float32]:
    chance = np.random.default_rng(1)
    return {name: chance.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def content(weights: PackedWeights, index: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """`count` elements from the address that the library is given."""
    return np.frombuffer(ctypes.string_at(weights.address(index), count * np.dtype(dtype).itemsize), dtype)


def everything(weights: PackedWeights) -> bytes:
    """4096 bytes from the beginning of each weight on, as far as another follows."""
    return b"".join(content(weights, index, 4096, np.uint8).tobytes() for index in range(3))


@pytest.mark.parametrize("dtype", list(DType))
def test_every_element_lies_where_the_kernels_read_it(dtype: DType) -> None:
    built, tensors = program(dtype), arrays()
    weights = PackedWeights.pack(built, tensors.get)
    matrices = {0: tensors["embedding"], 2: np.concatenate([tensors["first"], tensors["second"]])}
    for index, matrix in matrices.items():
        rows, columns = matrix.shape
        assert weights.shape(index) == (rows, columns)
        expected = torch.from_numpy(matrix).to(TORCH_DTYPE[dtype])
        bits = expected.view(torch.uint16 if dtype is DType.BFLOAT16 else torch.float32).numpy()
        together = dtype is DType.BFLOAT16
        depth = columns + columns % 2 if together else columns
        panels = -(-rows // 64)
        got = content(weights, index, panels * 64 * depth, bits.dtype)
        seen = np.zeros(len(got), bool)
        for row in range(rows):
            for column in range(columns):
                in_panel = (column // 2 * 64 + row % 64) * 2 + column % 2 if together else column * 64 + row % 64
                at = row // 64 * 64 * depth + in_panel
                assert got[at] == bits[row, column]
                seen[at] = True
        assert not got[~seen].any(), "padding isn't zero"
    norm = torch.from_numpy(tensors["norm"]).to(TORCH_DTYPE[dtype]).float()
    assert np.array_equal(content(weights, 1, 37, np.float32), norm.numpy())
    assert np.array_equal(content(weights, 3, 27, np.float32), tensors["cos"].ravel())
    assert all(weights.address(index) % 64 == 0 for index in range(4))


def test_rounding_is_that_of_torch() -> None:
    halves = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)  # every bfloat16, and what lies around each
    near = [halves + np.uint32(offset) for offset in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    bits = np.concatenate([*near, np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)])
    values = bits.view(np.float32)
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    got = to_bfloat16(values)
    numbers = ~np.isnan(values)
    assert np.array_equal(got[numbers], expected[numbers])
    for some in (got, expected):  # torch's own paths differ in which NaN they give
        assert torch.from_numpy(some[~numbers].copy()).view(torch.bfloat16).isnan().all()


@pytest.mark.parametrize("dtype", list(DType))
def test_a_file_holds_what_memory_would(dtype: DType, tmp_path: Path) -> None:
    built, tensors = program(dtype), arrays()
    with (tmp_path / "packed").open("wb") as file:
        packed.write(file, built, tensors.get)
    opened = PackedWeights.open(tmp_path / "packed", built)
    assert opened is not None
    assert everything(opened) == everything(PackedWeights.pack(built, tensors.get))


def test_a_file_that_is_not_whole_or_not_the_programs_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, path = program(DType.BFLOAT16), tmp_path / "packed"
    assert PackedWeights.open(path, built) is None
    with path.open("wb") as file:
        packed.write(file, built, arrays().get)
    whole = path.read_bytes()
    assert PackedWeights.open(path, built) is not None
    assert PackedWeights.open(path, program(DType.FLOAT32)) is None
    for torn in (b"", whole[:10], whole[:5000], whole[:-1], whole + b"\0"):
        path.write_bytes(torn)
        assert PackedWeights.open(path, built) is None
    path.write_bytes(whole)
    monkeypatch.setattr(packed, "PACKING_VERSION", packed.PACKING_VERSION + 1)
    assert PackedWeights.open(path, built) is None


def test_a_tensor_that_does_not_fit_is_named() -> None:
    tensors = arrays()
    with pytest.raises(WeightMismatch, match="weight second is missing"):
        PackedWeights.pack(program(DType.FLOAT32), {k: v for k, v in tensors.items() if k != "second"}.get)
    with pytest.raises(WeightMismatch, match=r"weight norm has shape \[36\]"):
        PackedWeights.pack(program(DType.FLOAT32), (tensors | {"norm": tensors["norm"][:36]}).get)
