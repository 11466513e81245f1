"""Log probabilities of given tokens and of the most likely ones, from raw logits.

For a row with the largest logit m: logprob(i) = float32((x_i - m) - log(S)), in float64, where S sums exp(x - m) as the
sampler sums masses (`kernels/sampling.py`): in integers, so that S is the same in any order. Tokens are ordered by
descending logit, then ascending id. Implementations may differ in the last bit of a float32, where the last bit of an
exponential or a logarithm decides its rounding.
"""

from __future__ import annotations

#: (logprob, rank from 1, the first of the order as (id, logprob))
TokenLogprob = tuple[float, int, tuple[tuple[int, float], ...]]
