"""Outputs of the null model by definition: one token after another, no engine."""

from __future__ import annotations

from batonq.engine.sampling_params import SamplingParams
from tests.support import null_engine


def alone(prompt: list[int], params: SamplingParams, order: int = 0) -> list[int]:
    """The output of a prompt, by the model and the rules of ending alone."""
    tokens, output = list(prompt), list[int]()
    assert params.max_tokens is not None
    while len(output) < params.max_tokens:
        token = null_engine.next_token(tokens, params, len(output), order)
        output.append(token)
        tokens.append(token)
        if token in params.stop_token_ids or (token == null_engine.EOS and not params.ignore_eos):
            break
    return output
