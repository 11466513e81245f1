"""Draws the next token of each row: what a plan's contexts ask for, handed to the sampling arithmetic.

A draw is a pure function of logits, parameters, history, seed and position; so there is no state to keep.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from batonq.engine.bad_words import banned_after
from batonq.engine.context import Context
from batonq.engine.errors import EngineError
from batonq.engine.logprobs import LOWEST, TokenLogprobs
from batonq.engine.plan import Plan, Samples
from batonq.kernels.adjustments import Adjustment
from batonq.kernels.errors import InvalidLogits, NoCandidates
from batonq.kernels.logprobs import token_logprobs
from batonq.kernels.sampling import SamplingBatch, sample


class TorchSampler:
    """The sampler contract of `kernels/sampling.py` over a plan's rows."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids

    def sample(self, plan: Plan, logits: npt.NDArray[np.float32]) -> Samples:
        """What each row's logits give; a row with unusable logits gets its own error and hurts no other."""
        contexts = [row.context for row in plan.sampling_rows]
        rows = torch.from_numpy(logits)
        tokens = self._draw(contexts, rows[: len(contexts)])
        return Samples(tokens, _logprobs(contexts, tokens, rows), tuple(_prompt_logprobs(plan, rows[len(contexts) :])))

    def _draw(self, contexts: Sequence[Context], logits: torch.Tensor) -> list[int | EngineError]:
        results: list[int | EngineError | None] = [None] * len(contexts)
        left = list(range(len(contexts)))
        while left:
            rows = logits if len(left) == len(contexts) else logits[left]
            try:
                drawn = sample(rows, self._batch([contexts[index] for index in left]))
            except (InvalidLogits, NoCandidates) as error:
                results[left.pop(error.row)] = EngineError(error.code, error.message)
            else:
                for index, token in zip(left, drawn, strict=True):
                    results[index] = int(token)
                break
        return [result for result in results if result is not None]

    def _batch(self, contexts: Sequence[Context]) -> SamplingBatch:
        params = [context.sampling_params for context in contexts]
        return SamplingBatch(
            temperature=[p.temperature for p in params],
            top_k=[p.top_k for p in params],
            top_p=[p.top_p for p in params],
            min_p=[p.min_p for p in params],
            seed=[context.seed for context in contexts],
            position=[context.position_offset + context.token_count for context in contexts],
            adjustments=[self._adjustment(context) for context in contexts],
        )

    def _adjustment(self, context: Context) -> Adjustment | None:
        params, history = context.sampling_params, context.history
        banned = (*banned_after(context.output_token_ids, params.bad_words_token_ids), *self._held_off(context))
        if not banned and not params.logit_bias and params.allowed_token_ids is None and history is None:
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

    def _held_off(self, context: Context) -> tuple[int, ...]:
        """Tokens that would end an output below `min_tokens`."""
        params = context.sampling_params
        if len(context.output_token_ids) >= params.min_tokens:
            return ()
        eos = () if params.ignore_eos else tuple(sorted(self._eos_token_ids))
        return (*eos, *params.stop_token_ids)


def _logprobs(
    contexts: Sequence[Context], tokens: Sequence[int | EngineError], logits: torch.Tensor
) -> list[TokenLogprobs | None]:
    """Of the drawn tokens of contexts that ask for them."""
    results: list[TokenLogprobs | None] = [None] * len(contexts)
    for index, (context, token) in enumerate(zip(contexts, tokens, strict=True)):
        num_top = context.sampling_params.logprobs
        if num_top is not None and not isinstance(token, EngineError):
            (results[index],) = _entries(logits[index : index + 1], [token], num_top)
    return results


def _prompt_logprobs(plan: Plan, logits: torch.Tensor) -> list[list[TokenLogprobs] | EngineError]:
    results: list[list[TokenLogprobs] | EngineError] = []
    for row in plan.prompt_logprobs_rows:
        rows, logits = logits[: len(row.prompt_logits)], logits[len(row.prompt_logits) :]
        num_top = row.context.sampling_params.prompt_logprobs
        assert num_top is not None
        tokens = row.context.input_token_ids[row.prompt_logits.start + 1 : row.prompt_logits.stop + 1]
        try:
            results.append(_entries(rows, tokens, num_top))
        except InvalidLogits as error:
            results.append(EngineError(error.code, error.message))
    return results


def _entries(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    found = token_logprobs(logits, tokens, [num_top] * len(tokens))
    return [
        TokenLogprobs(token, max(logprob, LOWEST), rank, tuple((other, max(value, LOWEST)) for other, value in top))
        for token, (logprob, rank, top) in zip(tokens, found, strict=True)
    ]
