"""Draws the next token of each row: what a plan's contexts ask for, handed to the sampling arithmetic.

A draw is a pure function of logits, parameters, history, seed and position; so there is no state to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from batonq.engine.bad_words import banned_after
from batonq.engine.context import Context
from batonq.engine.errors import EngineError
from batonq.engine.logprobs import LOWEST, TokenLogprobs
from batonq.engine.plan import Plan, Samples, ScheduledContext
from batonq.kernels.adjustments import Adjustment
from batonq.kernels.errors import InvalidLogits, KernelError
from batonq.kernels.logits import Logits
from batonq.kernels.logprobs import TokenLogprob
from batonq.kernels.sampling import Drawn, SamplingBatch, unusable

Values = npt.NDArray[np.float32]


class SamplingArithmetic(Protocol):
    """The contract of `kernels/sampling.py` and `kernels/logprobs.py`; it leaves the logits as they are."""

    def sample(self, logits: Values, params: SamplingBatch) -> list[Drawn]:
        """A token id for each row of logits [L, V], or what is wrong with that row."""

    def token_logprobs(
        self, logits: Values, rows: Sequence[int], token_ids: Sequence[int], num_top: Sequence[int]
    ) -> list[TokenLogprob | InvalidLogits]:
        """What `rows` of the logits say of one token each and of their `num_top` most likely tokens."""


class PlanSampler:
    """Draws for the rows of a plan."""

    def __init__(self, eos_token_ids: frozenset[int], arithmetic: SamplingArithmetic) -> None:
        self.arithmetic = arithmetic
        self._eos_token_ids = tuple(sorted(eos_token_ids))

    def sample(self, plan: Plan, logits: Logits) -> Samples:
        """What each row's logits give; a row with unusable logits gets its own error and hurts no other."""
        rows = plan.drawn_rows
        batch = self._batch(rows)
        drawn = self.arithmetic.sample(logits.values[: len(batch.seed)], batch) if rows else []
        tokens = [_engine_error(token) if isinstance(token, KernelError) else token for token in drawn]
        logprobs = self._logprobs([row.context for row in rows for _ in row.draws], tokens, logits.values)
        prompt_logprobs = self._prompt_logprobs(plan, logits.values, len(tokens))
        return Samples(tokens + _greedy(logits), logprobs + [None] * len(logits.largest), prompt_logprobs)

    def _batch(self, rows: Sequence[ScheduledContext]) -> SamplingBatch:
        contexts = [row.context for row in rows for _ in row.draws]
        params = [context.sampling_params for context in contexts]
        return SamplingBatch(
            temperature=[p.temperature for p in params],
            top_k=[p.top_k for p in params],
            top_p=[p.top_p for p in params],
            min_p=[p.min_p for p in params],
            seed=[context.seed for context in contexts],
            position=[row.context.position_offset + at + 1 for row in rows for at in row.draws],
            adjustments=[adjustment for row in rows for adjustment in [self._adjustment(row.context)] * len(row.draws)],
        )

    def _adjustment(self, context: Context) -> Adjustment | None:
        params, history = context.sampling_params, context.history
        banned: Sequence[int] = ()
        if params.bad_words_token_ids:
            banned = banned_after(context.output_token_ids, params.bad_words_token_ids)
        if len(context.output_token_ids) < params.min_tokens:
            eos = () if params.ignore_eos else self._eos_token_ids
            banned = (*banned, *eos, *params.stop_token_ids)
        if history is None and not banned and not params.logit_bias and params.allowed_token_ids is None:
            return None
        return Adjustment(
            params.allowed_token_ids,
            banned,
            params.logit_bias,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            *(np.array(values, np.int32) for values in ((history.ids, history.counts) if history else ((), ()))),
        )

    def _logprobs(
        self, contexts: Sequence[Context], tokens: list[int | EngineError], logits: Values
    ) -> list[TokenLogprobs | None]:
        """Of the drawn tokens of contexts that ask for them; a token whose row has none becomes the error."""
        results: list[TokenLogprobs | None] = [None] * len(contexts)
        asked = [
            (row, token, context.sampling_params.logprobs)
            for row, (context, token) in enumerate(zip(contexts, tokens, strict=True))
            if context.sampling_params.logprobs is not None and not isinstance(token, EngineError)
        ]
        for (row, _, _), found in zip(asked, self._entries(logits, asked), strict=True):
            if isinstance(found, EngineError):  # NaN or +inf for a token that the request rules out
                tokens[row] = found
            else:
                results[row] = found
        return results

    def _prompt_logprobs(self, plan: Plan, logits: Values, first: int) -> list[list[TokenLogprobs] | EngineError]:
        results: list[list[TokenLogprobs] | EngineError] = []
        for row in plan.prompt_logprobs_rows:
            num_top = row.context.sampling_params.prompt_logprobs
            assert num_top is not None
            tokens = row.context.input_token_ids[row.prompt_logits.start + 1 : row.prompt_logits.stop + 1]
            found = self._entries(logits, [(index, token, num_top) for index, token in enumerate(tokens, first)])
            first += len(tokens)
            errors = (entry for entry in found if isinstance(entry, EngineError))
            results.append(next(errors, None) or [entry for entry in found if isinstance(entry, TokenLogprobs)])
        return results

    def _entries(self, logits: Values, asked: Sequence[tuple[int, int, int]]) -> list[TokenLogprobs | EngineError]:
        """For each (row of the logits, token, number of alternatives)."""
        if not asked:
            return []
        rows, tokens, num_top = zip(*asked, strict=True)
        found = self.arithmetic.token_logprobs(logits, rows, tokens, num_top)
        return [_entry(token, one) for token, one in zip(tokens, found, strict=True)]


def _greedy(logits: Logits) -> list[int | EngineError]:
    tokens: list[int | EngineError] = [*logits.largest_ids.tolist()]
    for row in np.flatnonzero(~np.isfinite(logits.largest)).tolist():
        if error := unusable(len(logits.values) + row, float(logits.largest[row])):
            tokens[row] = _engine_error(error)
    return tokens


def _entry(token: int, found: TokenLogprob | InvalidLogits) -> TokenLogprobs | EngineError:
    if isinstance(found, InvalidLogits):
        return _engine_error(found)
    logprob, rank, top = found
    return TokenLogprobs(token, max(logprob, LOWEST), rank, tuple((other, max(value, LOWEST)) for other, value in top))


def _engine_error(error: KernelError) -> EngineError:
    return EngineError(error.code, error.message)
