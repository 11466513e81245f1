"""What computes a batch, and which of the backends that is here."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from batonq.kernels.batch import Batch
from batonq.kernels.cpu_backend import CpuBackend, require_runnable
from batonq.kernels.cpu_library import ISA_VARIABLE
from batonq.kernels.errors import BackendUnavailable
from batonq.kernels.logits import Logits
from batonq.kernels.packed import PackedWeights
from batonq.kernels.program import Program

if TYPE_CHECKING:
    from torch import Tensor

#: Value of `BATONQ_CPU_ISA` that asks for the reference in torch.
TORCH = "torch"

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """Owns a program's weights and the memory of its KV blocks."""

    @property
    def numerics_id(self) -> str:
        """Names the arithmetic: results are bitwise equal only between equal ids."""

    @property
    def layout_id(self) -> str:
        """Names how the bytes of a KV block are laid out."""

    def forward(self, batch: Batch) -> Logits:
        """Stores the batch's keys and values; the logits of the wanted rows, valid until the next forward."""


class Weights(Protocol):
    """A program's weights, read from wherever they are when a backend asks for them."""

    def packed(self) -> PackedWeights:
        """In the compiled library's layout."""

    def tensors(self) -> Mapping[str, Tensor]:
        """By the names in `program.weights[i].sources`."""


def make_backend(program: Program, weights: Weights, num_blocks: int, num_threads: int | None = None) -> Backend:
    """The compiled backend where it can run the program, else the reference in torch.

    `BATONQ_CPU_ISA` asks for an instruction set or for `torch`; BackendUnavailable is raised if it can't be had.
    """
    forced = os.environ.get(ISA_VARIABLE)
    if forced != TORCH:
        try:
            require_runnable(program)
            return CpuBackend(program, weights.packed(), num_blocks, num_threads)
        except BackendUnavailable as error:
            if forced:
                raise
            logger.warning("computing through torch, which is several times slower: %s", error)
    from batonq.kernels.reference import ReferenceBackend  # noqa: PLC0415  # torch, for this alone

    return ReferenceBackend(program, weights.tensors(), num_blocks, num_threads)
