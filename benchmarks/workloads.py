"""Requests to measure with: Python's documentation topics cut into prompts, always the same for a seed, or a file.

A file has a request a line: `prompt_ids`, `max_tokens`, and, if sampled, `temperature` and `top_p`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Request:
    prompt_ids: list[int]
    #: Exactly this many output tokens are made: EOS is ignored.
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Shape:
    """How many requests, and the range, ends included, in which lengths of prompts and outputs are drawn evenly."""

    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    #: Tokens before each prompt that are the same in all.
    shared_prefix: int = 0
    temperature: float = 0.0
    top_p: float = 1.0


SHAPES = {
    # Mixed short work, as in nano-vllm's benchmark, scaled down.
    "w1_nano": Shape(64, (32, 256), (32, 256)),
    # One system prompt over many rows.
    "w2_dataset": Shape(256, (20, 80), (64, 64), shared_prefix=200, temperature=0.8, top_p=0.95),
    "w3_long": Shape(4, (4096, 4096), (128, 128)),
    # Latency of one.
    "w4_single": Shape(1, (64, 64), (256, 256)),
    "warm": Shape(4, (32, 32), (8, 8)),
}

#: Another seed would draw other totals; with this one `w1_nano` has 8,421 prompt and 9,274 output tokens, `w2_dataset`
#: 64,074 and 16,384.
SEED = 1281

#: Token ids that are no special ones, to begin prompts with.
_FIRST_TOKEN = count(1000)


def generated(encode: Encode, shape: Shape, seed: int = SEED) -> list[Request]:
    """Another seed cuts the text elsewhere, so that no prefix is in a cache from the run before."""
    chance = random.Random(seed)
    lengths = [(chance.randint(*shape.prompt), chance.randint(*shape.output)) for _ in range(shape.requests)]
    text = encode("\n\n".join(topics[name].strip() for name in sorted(topics))[:400_000])

    def cut(length: int) -> list[int]:
        start = chance.randrange(len(text) - length)
        return text[start : start + length]

    prefix = cut(shape.shared_prefix)
    return [Request(prefix + cut(prompt), output, shape.temperature, shape.top_p) for prompt, output in lengths]


def mixed(encode: Encode, requests: int, seed: int) -> list[Request]:
    """Short mixed work for a quick look: prompts of 16 to 256 tokens, outputs of 16 to 128."""
    return generated(encode, Shape(requests, (16, 256), (16, 128)), seed)


def cold(requests: list[Request]) -> list[Request]:
    """The same with a first token that no prompt had before, so that no prefix cache helps; what they share stays."""
    first = next(_FIRST_TOKEN)
    return [replace(request, prompt_ids=[first, *request.prompt_ids[1:]]) for request in requests]


def from_row(row: dict[str, Any]) -> Request:
    """Raises ValueError if an EOS would end it: the number of its tokens would not be known."""
    if not row.get("ignore_eos", True):
        raise ValueError(f"a request of {len(row['prompt_ids'])} prompt tokens does not ignore EOS")
    return Request(row["prompt_ids"], row["max_tokens"], row.get("temperature", 0.0), row.get("top_p", 1.0))


def read_workload(path: Path, limit: int | None = None) -> list[Request]:
    """The first `limit` requests of a file, or all."""
    with path.open(encoding="utf-8") as lines:
        return [from_row(json.loads(line)) for line in islice(lines, limit)]


def write_workload(path: Path, requests: Iterable[Request]) -> None:
    """A file that `read_workload` reads, and that others read who know its names."""
    rows = ({"id": index, **vars(request), "ignore_eos": True} for index, request in enumerate(requests))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
