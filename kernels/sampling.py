"""Draws a token for each row of logits: filters, then the arg max of value plus noise, with no state and no neighbours.

The contract, for a row of float32 logits; every implementation gives the same token for the same logits:

1. The request's adjustments, in this order; -inf stays -inf throughout:
   a. `allowed_token_ids`: every other logit becomes -inf.
   b. `bad_words`: a token that would complete one becomes -inf.
   c. `logit_bias`: logit = float32(float64(logit) + bias).
   d. `min_tokens`: while the output is shorter, tokens that end it become -inf.
   e. Penalties, for each token of output or (repetition penalty only) prompt, `count` being its occurrences in the
      output: v = float64(logit); v / repetition if v > 0, else v * repetition; less frequency * count; less presence
      if count > 0; logit = float32(v). Products and differences are rounded one by one (no fused multiply-add).
   Masks commute with the rest, so a, b and d may be done at once. The largest logit that is left must be finite, else
   the row is an error.
2. Temperature 0 takes the largest logit, the lowest id among equals, whatever else is set.
3. z = (logit - largest logit) / temperature, in float64. Tokens are ordered by descending logit, then ascending id.
4. `top_k` > 0 keeps the first k of that order.
5. `top_p` < 1 keeps the shortest prefix of what is left whose mass reaches `top_p` of the mass of what is left. A
   token's mass is the integer floor(exp(z) · 2⁴⁴), so that sums are the same in any order; the two sums are compared
   as float64: float(prefix) >= top_p · float(all).
6. `min_p` > 0 keeps z >= log(min_p).
7. The token with the largest z + gumbel(seed, position, id) is drawn (`kernels/philox.py`), the lowest id among equals.
   This draws from the softmax over what is left (Gumbel-max trick).

What is kept is always a prefix of the order. `kernels/cpu_sampling.py` carries it out in C++ and
`kernels/reference_sampling.py` in torch; they may differ where a last bit of an exponential or a logarithm decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from batonq.kernels.adjustments import Adjustment
from batonq.kernels.errors import InvalidLogits, NoCandidates

#: The mass of the most likely token.
MASS_SCALE = 2.0**44

#: A token id, or why the row gives none.
Drawn = int | InvalidLogits | NoCandidates


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Per row of the logits: parameters as in `engine/sampling_params.py`, and the absolute position to draw.

    `top_k` below 1 and `top_p` at 1 keep all. A row without adjustment has None.
    """

    temperature: Sequence[float]
    top_k: Sequence[int]
    top_p: Sequence[float]
    min_p: Sequence[float]
    seed: Sequence[int]
    position: Sequence[int]
    adjustments: Sequence[Adjustment | None]


def unusable(row: int, largest: float) -> InvalidLogits | NoCandidates | None:
    """What is wrong with a row whose largest adjusted logit (NaN if there is one) is `largest`."""
    if largest == -math.inf:
        return NoCandidates(row)
    return None if math.isfinite(largest) else InvalidLogits(row, largest)
