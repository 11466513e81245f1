"""What one context may need at most, and a request's parameters as they will really be carried out.

Light, and apart from the engine, because a worker's parent process answers a request that can never fit without asking
the engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from batonq.engine.bad_words import WordEncoder, bad_word_sequences
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
        for name, ids in _token_ids(params).items():
            for token in ids:
                if token >= self.vocab_size:
                    message = f"{name}: token {token} does not exist; the vocabulary has {self.vocab_size}"
                    raise EngineError("invalid_parameter", message, f"sampling.{name}")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.vocab_size:
                message = f"{name}: {getattr(params, name)} is more than the vocabulary's {self.vocab_size}"
                raise EngineError("invalid_parameter", message, f"sampling.{name}")


def _token_ids(params: SamplingParams) -> dict[str, Iterable[int]]:
    """Every token id in the parameters, by the field's name."""
    return {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words_token_ids": chain.from_iterable(params.bad_words_token_ids),
    }


def effective_request(
    limits: Limits, encoder: WordEncoder, input_token_ids: Sequence[int], params: SamplingParams
) -> tuple[tuple[int, ...], SamplingParams]:
    """The token ids and parameters that are carried out: the input truncated as asked, bad words as token ids, then
    `Limits.effective`, which says what is raised. Done again on its own result it changes nothing."""
    if params.truncate_prompt_tokens is not None:
        input_token_ids = input_token_ids[-params.truncate_prompt_tokens :]
    if params.bad_words:
        sequences = bad_word_sequences(params.bad_words, encoder)
        update = {"bad_words": (), "bad_words_token_ids": (*params.bad_words_token_ids, *sequences)}
        params = params.model_copy(update=update)
    return tuple(input_token_ids), limits.effective(input_token_ids, params)
