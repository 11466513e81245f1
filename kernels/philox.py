"""The sampler's noise, one number at a time: Philox4x32-10 and the Gumbel draw made of it.

This is the definition in plain Python; `kernels/reference_sampling.py` and `kernels/cpu/sampling_arithmetic.h` compute
the same on arrays.

Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11; constants of Random123) is a function from
a counter and a key to four random words, so noise has no state: the same (seed, position, token) gives the same draw
wherever and whenever it is asked for.

    counter = (position, token id div 4, purpose, rng version)  key = (seed mod 2³², seed div 2³²)
    u = (x[token id mod 4] + 0.5) · 2⁻³²                        gumbel = -log(-log(u)), in float64

So four neighbours share a call, and a whole vocabulary takes a quarter as many as it has tokens.
"""

from __future__ import annotations

import math

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MASK = 0xFFFFFFFF

#: What a draw is for: two purposes never share noise.
PURPOSE_SAMPLE = 0

#: Raised if the meaning of counter, key or output changes.
RNG_VERSION = 2

#: No draw is larger: a word of 2³² - 1 gives -log(-log(1 - 2⁻³³)), 33·log(2) up to 1e-10.
MAX_GUMBEL = -math.log(-math.log1p(-(2.0**-33)))


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words for a counter and a key of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & MASK, (product0 >> 32) ^ c3 ^ k1, product0 & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def gumbel(seed: int, position: int, token_id: int) -> float:
    """The noise of one token at one position; `seed` has 64 bits."""
    words = philox4x32((position, token_id // 4, PURPOSE_SAMPLE, RNG_VERSION), (seed & MASK, seed >> 32))
    return -math.log(-math.log((words[token_id % 4] + 0.5) * 2.0**-32))
