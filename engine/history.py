"""Which tokens a context has seen and how often it has put them out: what penalties are counted from.

Kept up token by token, in flat arrays, so that a step costs nothing for tokens that were counted before.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class TokenHistory:
    """Distinct tokens in order of first appearance: `ids`, and beside them `counts` of their occurrences in the output
    (0 for a token of the prompt alone). Both are int32."""

    __slots__ = ("_index", "counts", "ids")

    def __init__(self, prompt_token_ids: Iterable[int] = ()) -> None:
        self._index = {token: index for index, token in enumerate(dict.fromkeys(prompt_token_ids))}
        self.ids = array("i", self._index)
        self.counts = array("i", bytes(4 * len(self._index)))

    def push(self, token_id: int) -> None:
        """Count one output token."""
        index = self._index.setdefault(token_id, len(self._index))
        if index == len(self.ids):
            self.ids.append(token_id)
            self.counts.append(0)
        self.counts[index] += 1
