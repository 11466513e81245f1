"""What a request does to its row of logits before a token is drawn: masks, bias, penalties.

Step 1 of the contract in `kernels/sampling.py`. Only the tokens named are touched, but for `allowed`, which is a mask
over the whole row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Adjustment:
    """One row's. Ids are within the vocabulary, except that `banned` ones beyond it are passed over."""

    #: The only tokens that may be drawn; None for all.
    allowed: Sequence[int] | None = None
    #: Tokens that may not be drawn now, for whatever reason.
    banned: Sequence[int] = ()
    #: What is added to the logits of tokens.
    bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    #: Distinct tokens that penalties look at, and how often each is in the output (0: only in the prompt).
    history_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    history_counts: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))


def adjusted(logits: Tensor, adjustments: Sequence[Adjustment | None]) -> Tensor:
    """The logits [L, V] float32 after each row's adjustment; themselves if there is none, else a copy."""
    if not any(adjustments):
        return logits
    logits = logits.clone()
    for row, adjustment in zip(logits, adjustments, strict=True):
        if adjustment is not None:
            _mask(row, adjustment)
            _add_bias(row, adjustment.bias)
            _penalise(row, adjustment)
    return logits


def _mask(row: Tensor, adjustment: Adjustment) -> None:
    if adjustment.allowed is not None:
        allowed = torch.tensor(adjustment.allowed)
        kept = row[allowed]
        row.fill_(-math.inf)
        row[allowed] = kept
    banned = [token for token in adjustment.banned if token < len(row)]
    if banned:
        row[torch.tensor(banned)] = -math.inf


def _add_bias(row: Tensor, bias: Mapping[int, float]) -> None:
    if bias:
        ids = torch.tensor(list(bias))
        row[ids] = row[ids].double().add_(torch.tensor(list(bias.values()), dtype=torch.float64)).float()


def _penalise(row: Tensor, adjustment: Adjustment) -> None:
    if len(adjustment.history_ids) == 0:
        return
    ids = torch.from_numpy(adjustment.history_ids).long()
    counts = torch.from_numpy(adjustment.history_counts).double()
    value = row[ids].double()
    value = torch.where(value > 0, value / adjustment.repetition_penalty, value * adjustment.repetition_penalty)
    value -= adjustment.frequency_penalty * counts
    value -= adjustment.presence_penalty * (counts > 0)
    row[ids] = value.float()
