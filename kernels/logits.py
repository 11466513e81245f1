"""What a step's logits tell: whole rows, and of greedy ones the largest alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Logits(NamedTuple):
    """Of a `Batch` with L rows of logits, the last G of them greedy; valid until the next forward."""

    #: [L - G, vocabulary] float32.
    values: npt.NDArray[np.float32]
    #: [G] where the largest logit of each greedy row is, the lowest id among equals, and what it is. With a NaN among
    #: them the largest is NaN, and the id says nothing.
    largest_ids: npt.NDArray[np.int32]
    largest: npt.NDArray[np.float32]
