"""What this machine can do at most, measured: multiply-adds a second in float32 and bf16, and bytes read from memory.

The loops are those of `ceilings.cpp`, which a C++ compiler (`$CXX`, or c++) makes for the instruction set in use.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from batonq.kernels.program import DType

_FLAGS = {
    "avx512bf16": ["-march=x86-64-v4", "-mavx512bf16"],
    "avx512": ["-march=x86-64-v4"],
    "avx2": ["-march=x86-64-v3"],
}

#: Rounds of `ceilings.cpp`'s loops in one try: a few hundredths of a second.
_ROUNDS = 4_000_000
#: Bytes that each thread reads in one try: far more than caches hold.
_BYTES = 256 << 20
_TRIES = 20


@dataclass(frozen=True)
class Ceilings:
    """Of all threads together, a second."""

    bytes_read: float
    float32_operations: float
    bfloat16_operations: float

    def operations(self, dtype: DType) -> float:
        return self.bfloat16_operations if dtype is DType.BFLOAT16 else self.float32_operations

    def __str__(self) -> str:
        return (
            f"{self.bytes_read / 1e9:.1f} GB/s read, {self.float32_operations / 1e9:.0f} GFLOP/s in float32, "
            f"{self.bfloat16_operations / 1e9:.0f} in bfloat16"
        )


def measure_ceilings(isa: str, threads: int) -> Ceilings:
    """The best of some tries each. Without an instruction for bf16 products, these are float32's."""
    library = _compiled(isa)
    numbers = np.full((threads, 24), 1 / 3, np.float32) + np.arange(24, dtype=np.float32) / 64
    data = [np.ones(_BYTES // 4, np.float32) for _ in range(threads)]

    def read(thread: int) -> float:
        library.read_memory(data[thread].ctypes.data, len(data[thread]))
        return _BYTES

    multiply_adds = _best(lambda thread: library.multiply_adds(_ROUNDS, numbers[thread].ctypes.data), threads)
    products = multiply_adds
    if isa == "avx512bf16":
        products = _best(lambda thread: library.bf16_products(_ROUNDS, numbers[thread].ctypes.data), threads)
    return Ceilings(_best(read, threads), multiply_adds, products)


def _compiled(isa: str) -> ctypes.CDLL:
    source = Path(__file__).with_suffix(".cpp")
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "ceilings.so"
        compiler = [os.environ.get("CXX", "c++"), "-std=gnu++17", "-O3", "-shared", "-fPIC", *_FLAGS[isa]]
        subprocess.run([*compiler, str(source), "-o", str(target)], check=True)
        library = ctypes.CDLL(str(target))
    for name in ("multiply_adds", "bf16_products") if isa == "avx512bf16" else ("multiply_adds",):
        getattr(library, name).restype = ctypes.c_double
        getattr(library, name).argtypes = [ctypes.c_int64, ctypes.c_void_p]
    library.read_memory.restype = ctypes.c_float
    library.read_memory.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    return library


def _best(work: Callable[[int], float], threads: int) -> float:
    """Units a second that `work(thread)` reports from all threads at once."""
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_TRIES):
            begin = time.perf_counter()
            done = sum(pool.map(work, range(threads)))
            best = max(best, done / (time.perf_counter() - begin))
    return best
