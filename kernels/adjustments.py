"""What a request does to its row of logits before a token is drawn: masks, bias, penalties.

Step 1 of the contract in `kernels/sampling.py`. Only the tokens named are touched, but for `allowed`, which is a mask
over the whole row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


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
