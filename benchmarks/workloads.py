"""Requests to measure with: Python's documentation topics cut into prompts, always the same for a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data.topics import topics


@dataclass(frozen=True)
class Request:
    prompt_ids: list[int]
    #: Exactly this many output tokens are made: EOS is ignored.
    max_tokens: int


def mixed(encode: Callable[[str], list[int]], count: int, seed: int) -> list[Request]:
    """Short mixed work, as in nano-vllm's benchmark, scaled down: prompts of 16 to 256 tokens, outputs of 16 to 128.

    Another seed cuts the text elsewhere, so that no prefix is in a cache from the run before.
    """
    chance = random.Random(seed)
    text = encode("\n\n".join(topics[name].strip() for name in sorted(topics))[:400_000])
    requests = []
    for _ in range(count):
        length = chance.randint(16, 256)
        start = chance.randrange(len(text) - length)
        requests.append(Request(text[start : start + length], chance.randint(16, 128)))
    return requests
