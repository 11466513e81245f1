"""Draws the next token of each row: what a plan's contexts ask for, handed to the sampling arithmetic.

A draw is a pure function of logits, parameters, history, seed and position; so there is no state to keep.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batonq.engine.context import Context
from batonq.engine.errors import EngineError
from batonq.engine.plan import Plan
from batonq.kernels.errors import SamplingError
from batonq.kernels.sampling import SamplingBatch, sample


class TorchSampler:
    """The sampler contract of `kernels/sampling.py` over a plan's rows."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
