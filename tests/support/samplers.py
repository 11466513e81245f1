"""The implementations of the sampler's contract that can run here, by name."""

from __future__ import annotations

from functools import cache

from batonq.engine.sampler import SamplingArithmetic
from batonq.kernels import reference_sampling
from batonq.kernels.cpu_library import Team
from batonq.kernels.cpu_sampling import CpuSampler
from batonq.kernels.errors import BackendUnavailable


@cache
def sampler(name: str, threads: int = 2) -> SamplingArithmetic:
    """`torch`, or the compiled one for an instruction set. Raises BackendUnavailable."""
    return reference_sampling if name == "torch" else CpuSampler(Team(threads), name)


@cache
def compiled() -> tuple[str, ...]:
    """The instruction sets that are here and have kernels of their own, best first."""
    found = []
    for isa in ("avx512", "avx2"):
        try:
            sampler(isa)
        except BackendUnavailable:
            continue
        found.append(isa)
    return tuple(found)
