"""The instruction sets that the library has kernels for, and whether this machine has them."""

from __future__ import annotations

import pytest

from batonq.kernels.cpu_library import Team
from batonq.kernels.cpu_sampling import CpuSampler
from batonq.kernels.errors import BackendUnavailable

ISAS = ("avx512bf16", "avx512", "avx2")


def skip_without(isa: str) -> None:
    """Skips the test on a machine without the instruction set, or without the library."""
    try:
        CpuSampler(Team(1), isa)
    except BackendUnavailable as error:
        pytest.skip(str(error))
