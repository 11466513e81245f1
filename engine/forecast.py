"""How much longer outputs will become: the expectation on which admission rests.

Admitting by `max_tokens` would leave most of the pool empty, since most outputs end long before; so the forecast is a
high quantile of the lengths that outputs really had, among those at least as long as this one already is.
Source: the "past-future" scheduler of LightLLM (Gong et al., ASPLOS 2025).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

from batonq.engine.context import Context


class OutputForecast:
    """Running quantile over the last `window` finished outputs."""

    def __init__(self, window: int = 256, quantile: float = 0.9) -> None:
        self._window = window
        self._quantile = quantile
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def observe(self, output_length: int) -> None:
        """Record the length, in tokens, of an output that ended by itself or at its limit."""
        self._recent.append(output_length)
        insort(self._sorted, output_length)
        if len(self._recent) > self._window:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]

    def remaining(self, context: Context) -> int:
        """Output tokens still expected of a context: at least 1, at most what its `max_tokens` leaves."""
        produced = len(context.output_token_ids)
        bound = max(1, context.max_tokens - produced)
        longer = bisect_right(self._sorted, produced)
        if longer == len(self._sorted):
            return bound
        index = longer + int((len(self._sorted) - longer) * self._quantile)
        return min(bound, self._sorted[min(index, len(self._sorted) - 1)] - produced)
