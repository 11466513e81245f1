"""Draws the next token of each row: what a plan's contexts ask for, handed to the sampling arithmetic.

A draw is a pure function of logits, parameters, history, seed and position; so there is no state to keep.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batonq.engine.context import Context
from batonq.engine.errors import EngineError
from batonq.engine.plan import Plan
from batonq.kernels.errors import InvalidLogits, NoCandidates
from batonq.kernels.sampling import SamplingBatch, sample


class TorchSampler:
    """The sampler contract of `kernels/sampling.py` over a plan's rows."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids

    def sample(self, plan: Plan, logits: torch.Tensor) -> list[int | EngineError]:
        """A token id for each sampling row; a row with unusable logits gets its own error and hurts no other."""
        contexts = [row.context for row in plan.sampling_rows]
        results: list[int | EngineError | None] = [None] * len(contexts)
        left = list(range(len(contexts)))
        while left:
            try:
                drawn = sample(logits[left], self._batch([contexts[index] for index in left]))
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
            banned=[self._banned(context) for context in contexts],
        )

    def _banned(self, context: Context) -> tuple[int, ...]:
        """Tokens that must not be drawn now: those that would end an output below `min_tokens`."""
        params = context.sampling_params
        if len(context.output_token_ids) >= params.min_tokens:
            return ()
        eos = () if params.ignore_eos else tuple(sorted(self._eos_token_ids))
        return (*eos, *params.stop_token_ids)
