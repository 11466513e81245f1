"""The CPU backend: hands a program to the compiled interpreter of `kernels/cpu/`, and a whole step to it in one call.

Its bits depend on nothing but a sequence's own tokens: not on neighbours, chunks, threads or where blocks lie. They may
differ between instruction sets, which the numerics id names.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import fields, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from batonq.kernels import probe
from batonq.kernels.batch import Batch
from batonq.kernels.cpu_library import Team, best_isa, library
from batonq.kernels.errors import BackendUnavailable
from batonq.kernels.fusion import fuse
from batonq.kernels.logits import Logits
from batonq.kernels.packed import PackedWeights
from batonq.kernels.program import Op, Program

#: Raised whenever a change of the library may alter a bit of any result.
KERNEL_VERSION = 4

#: Instruction sets that find the largest logit by a screen (`kernels/screen.py`); the others compute whole rows for it.
SCREENING_ISAS = frozenset({"avx512bf16"})

#: What the attention kernel has room for: `kMaxHeadDim` in kernels.h, and no more heads than its `kMaxRows`.
_MAX_HEAD_DIM, _MAX_GROUP = 256, 32


def why_not(program: Program) -> str | None:
    """What keeps a program from running here; None if nothing does."""
    spec = program.kv_cache
    groups = {op.q_heads // spec.kv_heads for op in program.ops if hasattr(op, "q_heads")}
    if spec.head_dim % 16 or spec.head_dim > _MAX_HEAD_DIM:
        return f"head_dim is {spec.head_dim}, not a multiple of 16 up to {_MAX_HEAD_DIM}"
    if max(groups, default=1) > _MAX_GROUP:
        return f"{max(groups)} query heads share a KV head, more than {_MAX_GROUP}"
    return None


def require_runnable(program: Program) -> None:
    """Raises BackendUnavailable if this program, or any, can't run here."""
    if reason := why_not(program):
        raise BackendUnavailable(reason)
    best_isa()


def encode(program: Program) -> npt.NDArray[np.int32]:
    """A program as the library reads it: sizes, the buffer table, then each op's length, code and fields.

    Floats are stored as their bits; fields are in the order in which `kernels/program.py` declares them.
    """
    spec = program.kv_cache
    words = [spec.kv_heads, spec.head_dim, spec.layers, program.dtype, program.output, program.vocab_size]
    words += [len(program.buffers), len(program.weights)]
    for buffer in program.buffers:
        words += [buffer.rows, buffer.width, buffer.dtype]
    for op in program.ops:
        values = [getattr(op, field.name) for field in fields(op)]
        words += [1 + len(values), op.code, *(_bits(v) if isinstance(v, float) else v for v in values)]
    return np.array([int(word) for word in words], np.int32)


def _bits(value: float) -> int:
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


def _with_largest(values: npt.NDArray[np.float32], greedy: int) -> Logits:
    """What is wanted of rows of which the last `greedy` are whole too."""
    whole = len(values) - greedy
    largest_ids = values[whole:].argmax(axis=1)
    return Logits(values[:whole], largest_ids.astype(np.int32), values[np.arange(whole, len(values)), largest_ids])


class CpuBackend:
    """A program with its weights and a KV cache of `num_blocks` blocks, zeroed, in the library's memory.

    `num_threads` are the library's own, the caller's included. Raises BackendUnavailable if the library, the
    instruction set or the memory isn't there.
    """

    def __init__(
        self,
        program: Program,
        weights: PackedWeights,
        num_blocks: int,
        num_threads: int | None = None,
        isa: str | None = None,
    ) -> None:
        require_runnable(program)
        assert weights.program == program
        self.program = program
        self._weights = weights
        self.isa = isa or best_isa()
        self.team = Team(num_threads)
        self._library = library()
        self._logits = np.empty((0, program.vocab_size), np.float32)
        self._fused = fuse(program)
        words = encode(self._fused)
        self._handle = self._library.batonq_create(
            self.team.handle, self.isa.encode(), words.ctypes.data, len(words), num_blocks
        )
        if not self._handle:
            size = num_blocks * program.kv_cache.bytes_per_block
            raise BackendUnavailable(f"no instruction set {self.isa} here, or no memory for {size} bytes of KV cache")
        for index in range(len(program.weights)):
            self._library.batonq_set_weight(self._handle, index, weights.address(index), *weights.shape(index))
        self._screens = weights.screen is not None and self.isa in SCREENING_ISAS
        if weights.screen is not None and self._screens:
            self._library.batonq_set_screen(self._handle, *weights.screen)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.batonq_destroy(self._handle)
            self._handle = None

    @cached_property
    def numerics_id(self) -> str:
        """Names the arithmetic: two backends with the same id give the same bits."""
        dtype = self.program.dtype
        program = probe.program(dtype)
        weights = PackedWeights.pack(program, probe.weights(dtype).get)
        forward = CpuBackend(program, weights, probe.NUM_BLOCKS, 1, self.isa).forward
        return f"{dtype.label}-{self.isa}-{KERNEL_VERSION}-{probe.digest(forward)}"

    @property
    def layout_id(self) -> str:
        """Names how the bytes of a KV block are laid out: those of kernels.h."""
        spec = self.program.kv_cache
        return f"cpu-{spec.dtype.label}-{spec.layers}x{spec.kv_heads}x{spec.block_size}x{spec.head_dim}"

    def forward(self, batch: Batch) -> Logits:
        """Runs a batch: stores its keys and values, and returns the logits of the wanted rows.

        They lie in memory that the next forward writes to again, because fresh memory would cost a page fault for each
        of their pages at every step.
        """
        if batch.num_greedy and not self._screens:
            return _with_largest(self.forward(replace(batch, num_greedy=0)).values, batch.num_greedy)
        whole = len(batch.logits_rows) - batch.num_greedy
        if len(self._logits) < whole:
            self._logits = np.empty((whole, self.program.vocab_size), np.float32)
        largest_ids, largest = np.empty(batch.num_greedy, np.int32), np.empty(batch.num_greedy, np.float32)
        logits = Logits(self._logits[:whole], largest_ids, largest)
        arrays = [
            np.ascontiguousarray(array)
            for array in (
                batch.token_ids,
                batch.positions,
                batch.query_start,
                batch.store_from,
                batch.block_tables,
                batch.logits_rows,
            )
        ]
        sizes = (len(batch.token_ids), len(batch.context_len), len(batch.logits_rows), batch.num_greedy)
        pointers = (array.ctypes.data for array in (*arrays, *logits))
        if not self._library.batonq_forward(self._handle, *sizes, batch.block_tables.shape[1], *pointers):
            raise MemoryError(f"no memory for the activations of {sizes[0]} tokens")
        return logits

    def profile(self, *, on: bool) -> list[tuple[Op, float]]:
        """The ops that are run and the seconds each has taken since the last call; goes on to measure them or not."""
        seconds = np.empty(len(self._fused.ops))
        self._library.batonq_profile(self._handle, on, seconds.ctypes.data)
        return list(zip(self._fused.ops, seconds.tolist(), strict=True))

    def cache_bytes(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """The memory of all keys and of all values, layer by layer, block by block; a view, valid as long as this."""
        keys, values, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int64()
        self._library.batonq_cache(self._handle, ctypes.byref(keys), ctypes.byref(values), ctypes.byref(size))
        views = (
            np.ctypeslib.as_array((ctypes.c_uint8 * size.value).from_address(p.value or 0)) for p in (keys, values)
        )
        return next(views), next(views)
