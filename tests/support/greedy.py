"""The oracle of greedy parity: one forward of transformers over a prompt and our output proves every token of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel


def assert_greedy(oracle: PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Each token of `output` is the arg max of transformers after `prompt` and the tokens before it.

    As causal attention sees nothing behind a token, this is what `generate` would have drawn one by one.
    """
    with torch.no_grad():
        logits = oracle(torch.tensor([[*prompt, *output[:-1]]]), logits_to_keep=len(output)).logits[0]
    assert list(output) == logits.argmax(dim=-1).tolist()
