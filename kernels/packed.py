"""A program's weights in the layout that the compiled library reads, in a file or in memory; packed by numpy alone.

    | header: one line of JSON | … zeros … | weight 0 | … zeros … | weight 1 | … | screen of the LM head (screen.py) |

The header says all that decides where the bytes lie and what they mean, so it is compared and not interpreted: a file
whose header isn't, byte for byte, what the program asks for is another's.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from batonq.kernels.errors import WeightMismatch
from batonq.kernels.fusion import fuse
from batonq.kernels.program import DType, Embed, Linear, LinearActivationMul, LinearAdd, LmHead, Program, Weight
from batonq.kernels.screen import can_screen, make_screen
from batonq.kernels.screen import nbytes as screen_nbytes

#: Raised whenever the layout of a file, or the bits in it, change.
PACKING_VERSION = 3

#: Columns of a panel (`kPanel` in kernels.h).
_PANEL = 64
_CACHE_LINE, _PAGE = 64, 4096
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

Float32 = npt.NDArray[np.float32]
#: The tensor of a name in `program.weights[i].sources`; None if there is none.
Find = Callable[[str], Float32 | None]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a weight lies. `matrix`: panels of the program's dtype (kernels.h); `gated`: the same, each panel holding
    rows of the first half and, beside them, those of the second; `values`: rows of float32; `screen`: screen.py's."""

    kind: str
    rows: int
    columns: int
    offset: int
    size: int


class PackedWeights:
    """The packed weights of `program`, read-only. Made by `open` and `pack`."""

    def __init__(self, program: Program, memory: mmap.mmap) -> None:
        self.program = program
        self._places = _layout(program)[1]
        self._bytes = np.frombuffer(memory, np.uint8)

    @classmethod
    def open(cls, path: Path, program: Program) -> PackedWeights | None:
        """Those in a file, all in memory; None if there is no file, or it doesn't hold this program's weights whole."""
        header, places = _layout(program)
        try:
            with path.open("rb") as file:
                if file.read(len(header)) != header or file.seek(0, 2) != _end(places):
                    return None
                return cls(program, _on_huge_pages(file))
        except FileNotFoundError:
            return None

    @classmethod
    def pack(cls, program: Program, find: Find) -> PackedWeights:
        """Packed in memory; otherwise as `write`."""
        memory = mmap.mmap(-1, _end(_layout(program)[1]), _ANONYMOUS)
        write(memory, program, find)
        return cls(program, memory)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, padding and header included."""
        return self._bytes.nbytes

    def address(self, index: int) -> int:
        """Where the weight at `index` of the program's table begins; valid as long as this."""
        return int(self._bytes.ctypes.data) + self._places[index].offset

    def shape(self, index: int) -> tuple[int, int]:
        """Rows and columns of the weight, unpadded."""
        return self._places[index].rows, self._places[index].columns

    @property
    def screen(self) -> tuple[int, int, int] | None:
        """Where the LM head's screen begins, and the shape of the weight; None if it has none."""
        index = len(self.program.weights)
        return None if _screened(self.program) is None else (self.address(index), *self.shape(index))


def write(file: BinaryIO | mmap.mmap, program: Program, find: Find) -> None:
    """Packs into a file: tensors are found one after another, and rounded to the weight's dtype.

    Raises WeightMismatch if one is missing or has another shape.
    """
    header, places = _layout(program)
    file.write(header)
    for weight, place in zip(program.weights, places, strict=False):  # and perhaps a screen
        values = _joined(weight, find)
        file.seek(place.offset)
        if place.kind == "gated":
            values = _side_by_side(values)
        packed = _rounded(values, weight.dtype) if place.kind == "values" else _panels(values, weight.dtype)
        file.write(packed.data)
    if (index := _screened(program)) is not None:
        weight = program.weights[index]
        file.seek(places[-1].offset)
        file.write(make_screen(_rounded(_joined(weight, find), weight.dtype)).data)


def key(program: Program) -> bytes:
    """All that the packing depends on beside the weights' values."""
    return _layout(program)[0]


def to_bfloat16(values: Float32) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16, halves to even; any NaN becomes 0xFFFF, as in torch's vectorised conversion."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0xFFFF), rounded.astype(np.uint16))


def _layout(program: Program) -> tuple[bytes, tuple[_Place, ...]]:
    """The header and the places of a program's weights, and behind them that of its screen, if it has one."""
    ops = fuse(program).ops
    kinds = {op.weight: "matrix" for op in ops if isinstance(op, Linear | LinearAdd | LmHead | Embed)}
    kinds |= {op.weight: "gated" for op in ops if isinstance(op, LinearActivationMul)}
    sized = [_sized(weight, kinds.get(index, "values")) for index, weight in enumerate(program.weights)]
    if (screened := _screened(program)) is not None:
        rows, columns = program.weights[screened].shape
        sized.append(("screen", rows, columns, screen_nbytes(rows, columns)))
    names = [[weight.name, weight.sources] for weight in program.weights]
    about = {"packing": PACKING_VERSION, "dtype": program.dtype.label, "weights": names, "sizes": sized}
    header = json.dumps(about).encode() + b"\n"
    places, at = [], len(header)
    for kind, rows, columns, size in sized:
        at = _round_up(at, _PAGE if size >= _PAGE else _CACHE_LINE)
        places.append(_Place(kind, rows, columns, at, size))
        at += size
    return header, tuple(places)


def _screened(program: Program) -> int | None:
    """The LM head's weight, if it can have a screen."""
    heads = {op.weight for op in program.ops if isinstance(op, LmHead)}
    return next((index for index in heads if len(heads) == 1 and can_screen(*program.weights[index].shape)), None)


def _sized(weight: Weight, kind: str) -> tuple[str, int, int, int]:
    """Kind, rows, columns and bytes of a weight."""
    rows, columns = weight.shape if len(weight.shape) == 2 else (weight.shape[0], 1)
    if kind == "values":
        return kind, rows, columns, rows * columns * 4
    padded = 2 * _round_up(rows // 2, _PANEL // 2) if kind == "gated" else _round_up(rows, _PANEL)
    return kind, rows, columns, padded * _depth(columns, weight.dtype) * weight.dtype.itemsize


def _depth(columns: int, dtype: DType) -> int:
    """Columns, padded to what one multiplication takes."""
    return columns if dtype is DType.FLOAT32 else _round_up(columns, 2)


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to


def _end(places: tuple[_Place, ...]) -> int:
    return places[-1].offset + places[-1].size


def _on_huge_pages(file: BinaryIO) -> mmap.mmap:
    """A file's bytes in memory: mapped where the file system gives it huge pages, else copied to some.

    A decode reads all weights, and on pages of 4 KiB takes 4 to 39 per cent longer.
    """
    before = _huge_file_pages()
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    _ask_for_huge_pages(mapped)
    content = np.frombuffer(mapped, np.uint8)
    content[:: mmap.PAGESIZE].max()  # touches every page, so that it is read now
    if _huge_file_pages() - before > len(mapped) // 2:
        return mapped
    copy = mmap.mmap(-1, len(mapped), _ANONYMOUS)
    _ask_for_huge_pages(copy)
    np.frombuffer(copy, np.uint8)[:] = content
    return copy


def _ask_for_huge_pages(memory: mmap.mmap) -> None:
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)


def _huge_file_pages() -> int:
    """Bytes of files that this process has mapped in huge pages, as far as the kernel says."""
    with suppress(FileNotFoundError), Path("/proc/self/smaps_rollup").open(encoding="ascii") as lines:
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("FilePmdMapped:"))
    return 0


def _joined(weight: Weight, find: Find) -> Float32:
    parts = []
    for name, rows in zip(weight.sources, weight.source_rows, strict=True):
        expected = (rows, *weight.shape[1:])
        found = find(name)
        if found is None or found.shape != expected:
            raise WeightMismatch(name, expected, None if found is None else found.shape)
        parts.append(found)
    return np.ascontiguousarray(np.concatenate(parts))


def _side_by_side(values: Float32) -> Float32:
    """[2 · units, columns] with 32 rows of the first half and the same 32 of the second in turn, padded with zeros."""
    rows, columns = values.shape
    halves = np.pad(values.reshape(2, rows // 2, columns), ((0, 0), (0, -(rows // 2) % (_PANEL // 2)), (0, 0)))
    split = halves.reshape(2, -1, _PANEL // 2, columns)
    return np.ascontiguousarray(split.transpose(1, 0, 2, 3)).reshape(-1, columns)


def _panels(values: Float32, dtype: DType) -> npt.NDArray[np.uint16] | Float32:
    """[rows, columns] as panels: [panel][depth / 2][64][2] in bfloat16, [panel][depth][64] in float32."""
    rows, columns = values.shape
    together = 1 if dtype is DType.FLOAT32 else 2
    padding = ((0, -rows % _PANEL), (0, -columns % together))
    padded = np.pad(values if dtype is DType.FLOAT32 else to_bfloat16(values), padding)
    split = padded.reshape(-1, _PANEL, padded.shape[1] // together, together)
    return np.ascontiguousarray(split.transpose(0, 2, 1, 3))


def _rounded(values: Float32, dtype: DType) -> Float32:
    if dtype is DType.FLOAT32:
        return values
    return (to_bfloat16(values).astype(np.uint32) << np.uint32(16)).view(np.float32)
