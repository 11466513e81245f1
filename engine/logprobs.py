"""Log probabilities of tokens, as results carry them and as they are stored with a context.

They are of the model's own distribution: the softmax of the raw logits, before masks, bias, penalties and temperature
(as vLLM's default, `raw_logprobs`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

#: No log probability is below this: OpenAI's stand-in for minus infinity, which JSON can't spell.
LOWEST = -9999.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token: its log probability and those of the most likely tokens in its place, rounded to float32.

    Tokens are ordered by descending logit, then ascending id: `rank` counts from 1 in that order, `top` is its head.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def _layout(num_top: int) -> struct.Struct:
    return struct.Struct("<IfI" + "If" * num_top)


def pack(entries: Sequence[TokenLogprobs], num_top: int) -> bytes:
    """Little-endian (id, logprob, rank) and `num_top` of (id, logprob) for each: 12 + 8·num_top bytes a token."""
    layout = _layout(num_top)
    return b"".join(
        layout.pack(entry.token_id, entry.logprob, entry.rank, *(part for pair in entry.top for part in pair))
        for entry in entries
    )


def unpack(packed: bytes, num_top: int) -> list[TokenLogprobs]:
    """Inverse of `pack`."""
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(top[::2], top[1::2], strict=True)))
        for token, logprob, rank, *top in _layout(num_top).iter_unpack(packed)
    ]
