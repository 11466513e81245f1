"""The compiled library of `kernels/cpu/`: where it lies, which instruction set runs, and the threads of a step."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib import resources

from batonq.kernels.errors import BackendUnavailable

#: Environment variable that forces an instruction set: avx512bf16, avx512 or avx2.
ISA_VARIABLE = "BATONQ_CPU_ISA"

#: Environment variable that names a library file to load in place of the package's own, such as one with sanitizers.
LIBRARY_VARIABLE = "BATONQ_CPU_LIBRARY"

_LIBRARY = "libbatonq_cpu.so"


@cache
def library() -> ctypes.CDLL:
    """The library with its functions (of interpreter.cpp, sampling.cpp, team.cpp). Raises BackendUnavailable."""
    path = os.environ.get(LIBRARY_VARIABLE) or str(resources.files("batonq.kernels") / _LIBRARY)
    try:
        loaded = ctypes.CDLL(path)
    except OSError as error:
        raise BackendUnavailable(f"{path} can't be loaded; it is built where pip finds a compiler: {error}") from None
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    loaded.batonq_best_isa.restype = ctypes.c_char_p
    loaded.batonq_team_create.restype = pointer
    loaded.batonq_team_create.argtypes = [ctypes.c_int]
    loaded.batonq_team_destroy.argtypes = [pointer]
    loaded.batonq_create.restype = pointer
    loaded.batonq_create.argtypes = [pointer, ctypes.c_char_p, pointer, integer, integer]
    loaded.batonq_destroy.argtypes = [pointer]
    loaded.batonq_set_weight.restype = None
    loaded.batonq_set_weight.argtypes = [pointer, ctypes.c_int, pointer, integer, integer]
    loaded.batonq_set_screen.restype = None
    loaded.batonq_set_screen.argtypes = [pointer, pointer, integer, integer]
    loaded.batonq_forward.restype = ctypes.c_bool
    loaded.batonq_forward.argtypes = [pointer, *[integer] * 5, *[pointer] * 9]
    loaded.batonq_cache.argtypes = [pointer, *[pointer] * 3]
    loaded.batonq_profile.restype = None
    loaded.batonq_profile.argtypes = [pointer, ctypes.c_bool, pointer]
    loaded.batonq_sampler_create.restype = pointer
    loaded.batonq_sampler_create.argtypes = [pointer, ctypes.c_char_p]
    loaded.batonq_sampler_destroy.argtypes = [pointer]
    loaded.batonq_sample.restype = loaded.batonq_token_logprobs.restype = ctypes.c_bool
    loaded.batonq_sample.argtypes = [pointer, pointer, integer, integer, *[pointer] * 4]
    loaded.batonq_token_logprobs.argtypes = [pointer, pointer, integer, integer, pointer]
    return loaded


def best_isa() -> str:
    """The instruction set that is used here: `BATONQ_CPU_ISA`, or the best one. Raises BackendUnavailable."""
    forced = os.environ.get(ISA_VARIABLE)
    found = forced or (library().batonq_best_isa() or b"").decode()
    if not found:
        raise BackendUnavailable("this CPU has none of the instruction sets avx512bf16, avx512, avx2")
    return found


def available_cores() -> int:
    """Cores that this process may use: its affinity, and the quota of its control group, rounded up."""
    cores = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:  # noqa: PTH123 - a kernel file, not a path
            quota, period = file.read().split()
    except OSError:
        return cores
    return cores if quota == "max" else max(1, min(cores, -(-int(quota) // int(period))))


class Team:
    """`size` threads, the caller's included, on which one call of the library runs at a time."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size or available_cores()
        self._library = library()
        self.handle = self._library.batonq_team_create(self.size)
        if not self.handle:
            raise BackendUnavailable(f"{self.size} threads can't be started")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.batonq_team_destroy(self.handle)
            self.handle = None
