"""Guesses the tokens that a context will draw, so that several come of one step.

A draw is a function of what precedes it alone, and the kernels give a row the same bits in any company. So a step may
compute guessed tokens behind a context's last one and draw at each of them: as long as what is drawn is what was
guessed, all of it is what single steps would have drawn, to the bit; the first that differs is still right, and the
guesses behind it are dropped. Wrong guesses cost time, never tokens.

Guesses come from the context's own tokens ("prompt lookup", the n-gram method of vLLM): where the last two or three
tokens have occurred before, what followed them then.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batonq.engine.context import Context

#: How many tokens must have occurred before; more are more telling.
_NGRAMS = (2, 3)

#: Tokens back to which they are looked for, which bounds the time of a search (about 10 microseconds).
LOOKBACK = 4096

#: A step that decodes costs about its rows and this many more: it reads all weights, however few rows there are.
#: Measured for SmolLM2-135M in bf16 on two cores; the optimum is flat (8 to 24: 1 % of the time).
FIXED_ROWS = 12

#: Chance that a first guess is right, and how much each token that was guessed moves it.
_FIRST_CHANCE, _STEP = 0.5, 0.1


class PromptLookup:
    """What a context's tokens say about those to come."""

    __slots__ = ("_next", "_tokens", "chance")

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = array("I", tokens)
        #: Index of the token that is expected to come again now; None without a guess.
        self._next = self._find()
        #: How often the token that was expected came, of late.
        self.chance = _FIRST_CHANCE

    def push(self, token_id: int) -> None:
        """Take in the context's next token."""
        expected = self._next
        self._tokens.append(token_id)
        if expected is not None:
            came = self._tokens[expected] == token_id
            self.chance += _STEP * (came - self.chance)
            if came:
                self._next = expected + 1
                return
        self._next = self._find()

    @property
    def has_guess(self) -> bool:
        """Whether there is anything to go by."""
        return self._next is not None

    def guess(self, count: int) -> tuple[int, ...]:
        """The next `count` tokens, as far as they can be guessed. What recurs is taken to go on recurring."""
        if self._next is None:
            return ()
        known = self._tokens[self._next : self._next + count]
        period = len(self._tokens) - self._next
        return tuple(known[i % period] for i in range(count))

    def _find(self) -> int | None:
        size = self._tokens.itemsize
        window = self._tokens[-LOOKBACK:]
        text = window.tobytes()
        found = None
        for length in _NGRAMS:
            needle = text[-length * size :]
            at = text.rfind(needle, 0, -size) if len(window) > length else -1
            while at % size and at >= 0:  # across the borders of tokens
                at = text.rfind(needle, 0, at + len(needle) - 1)
            if at < 0:
                break
            found = len(self._tokens) - len(window) + at // size + length
        return found


def choose_guesses(contexts: Sequence[Context], most: int, budget: int) -> dict[str, tuple[int, ...]]:
    """What to guess for contexts that decode, by context id: up to `most` tokens each and `budget` in all.

    A guess is worth its row if its chance is above what a row costs, as a part of what a token costs without guesses.
    """
    worth = len(contexts) / (FIXED_ROWS + len(contexts))
    guesses: dict[str, tuple[int, ...]] = {}
    for context in contexts:
        lookup, drawn = context.lookup, len(context.output_token_ids)
        if lookup is None or not lookup.has_guess or lookup.chance <= worth:
            continue
        if drawn < context.sampling_params.min_tokens:
            continue  # the next draw may not end it, one behind it may
        room = min(most, budget, context.max_tokens - drawn - 1)  # behind the last token nothing is drawn
        count, chance = 0, lookup.chance
        while count < room and chance > worth:
            count, chance = count + 1, chance * lookup.chance
        if count:
            guesses[context.context_id] = lookup.guess(count)
            budget -= count
    return guesses
