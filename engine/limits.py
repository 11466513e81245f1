"""What one context may need at most, and a request's parameters as they will really be carried out.

Light, and apart from the engine, because a worker's parent process answers a request that can never fit without asking
the engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from batonq.engine.errors import ContextLengthExceeded, EngineError, InvalidTokenIds
from batonq.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a loaded model with its cache, in tokens."""

    #: Longest context, output included, that the model was made for or the operator allows.
    max_model_len: int
    #: Tokens that the whole KV pool holds.
    kv_cache_tokens: int
    vocab_size: int

    def effective(self, input_token_ids: Sequence[int], params: SamplingParams) -> SamplingParams:
        """The parameters as they will be carried out: `max_tokens` within the room, `seed` chosen if not given.

        Raises ContextLengthExceeded if not one token can follow the input, and InvalidTokenIds or EngineError for an
        id that the vocabulary does not have.
        """
        self._check_ids(input_token_ids, params)
        limit = min(self.max_model_len, self.kv_cache_tokens)
        room = limit - len(input_token_ids)
        if room < 1:
            what = "the KV cache" if self.kv_cache_tokens < self.max_model_len else "the model's context"
            raise ContextLengthExceeded(len(input_token_ids), limit, what)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        update = {"max_tokens": max_tokens, "min_tokens": min(params.min_tokens, max_tokens), "seed": seed}
        return params.model_copy(update=update)

    def _check_ids(self, input_token_ids: Sequence[int], params: SamplingParams) -> None:
        if not input_token_ids:
            raise InvalidTokenIds("the input has no tokens")
        for index, token in enumerate(input_token_ids):
            if not 0 <= token < self.vocab_size:
                raise InvalidTokenIds(f"token {index} of the input is {token}; the vocabulary has {self.vocab_size}")
        for token in params.stop_token_ids:
            if token >= self.vocab_size:
                raise EngineError(
                    "invalid_parameter",
                    f"stop token {token} does not exist; the vocabulary has {self.vocab_size}",
                    "sampling.stop_token_ids",
                )
