"""Log probabilities of given tokens and of the most likely ones, from raw logits.

For a row with the largest logit m: logprob(i) = float32((x_i - m) - log(S)), in float64, where S sums exp(x - m) as the
sampler sums masses (`kernels/sampling.py`): in integers, so that S is the same in any order. Tokens are ordered by
descending logit, then ascending id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from batonq.kernels.errors import InvalidLogits
from batonq.kernels.sampling import MASS_SCALE, mass

#: Rows that are held in float64 at once.
_CHUNK = 8

#: (logprob, rank from 1, the first of the order as (id, logprob))
TokenLogprob = tuple[float, int, tuple[tuple[int, float], ...]]


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """What the rows of logits [L, V] float32 say of one token each, and of their `num_top` most likely tokens.

    Raises `InvalidLogits` for the first row that has no largest finite value.
    """
    results: list[TokenLogprob] = []
    for start in range(0, len(logits), _CHUNK):
        rows = logits[start : start + _CHUNK]
        largest = rows.amax(dim=1).double()
        for index, value in enumerate(largest.tolist()):
            if not math.isfinite(value):
                raise InvalidLogits(start + index, value)
        total = mass(rows.double() - largest.unsqueeze(1)).sum(dim=1).double() / MASS_SCALE
        for index, (row, m, log_total) in enumerate(zip(rows, largest, total.log(), strict=True), start):
            results.append(_one(row, m, log_total, token_ids[index], num_top[index]))
    return results


def _one(row: Tensor, largest: Tensor, log_total: Tensor, token: int, num_top: int) -> TokenLogprob:
    value = row[token]
    rank = 1 + int((row > value).sum()) + int((row[:token] == value).sum())
    ids = _first(row, num_top)
    values = row[torch.tensor([token, *ids])].double()
    logprob, *top = ((values - largest) - log_total).float().tolist()
    return logprob, rank, tuple(zip(ids, top, strict=True))


def _first(row: Tensor, count: int) -> list[int]:
    """The first `count` tokens of the order."""
    if count == 0:
        return []
    least = row.topk(count).values[-1]  # topk leaves equal values in any order, so only the border is taken from it
    ids = (row >= least).nonzero().flatten()
    chosen: list[int] = ids[row[ids].sort(descending=True, stable=True).indices[:count]].tolist()
    return chosen
