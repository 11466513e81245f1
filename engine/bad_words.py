"""Words that an output must not contain, as the token sequences that spell them.

As in vLLM: each word is spelt without a space before it and, where that makes another first token in a sequence of the
same length, with one. Other spellings of the word, by other tokens, stay possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from batonq.engine.errors import EngineError


class WordEncoder(Protocol):
    """Text to token ids, with nothing put around it."""

    def encode_word(self, text: str) -> list[int]:
        """Token ids of the text alone."""


def bad_word_sequences(words: Sequence[str], encoder: WordEncoder) -> list[tuple[int, ...]]:
    """The token sequences of the words, in order. Raises EngineError for a word that has no tokens."""
    sequences = []
    for word in words:
        bare = encoder.encode_word(word.lstrip())
        spaced = encoder.encode_word(" " + word.lstrip())
        if not bare:
            raise EngineError("invalid_parameter", f"bad_words: {word!r} has no tokens", "sampling.bad_words")
        sequences.append(tuple(bare))
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences.append(tuple(spaced))
    return sequences


def banned_after(output_token_ids: Sequence[int], sequences: Sequence[Sequence[int]]) -> list[int]:
    """The tokens that would complete one of the sequences now."""
    return [last for *before, last in sequences if not before or list(output_token_ids[-len(before) :]) == before]
