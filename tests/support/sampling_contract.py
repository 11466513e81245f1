"""The sampler's contract (the docstring of `kernels/sampling.py`) spelt out one number at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from batonq.engine.sampling_params import SamplingParams
from batonq.kernels.philox import gumbel


def adjust(logits: Sequence[float], p: Mapping[str, Any]) -> list[float]:
    """Step 1, for one row."""
    row = list(logits)
    if p.get("allowed") is not None:
        row = [x if i in p["allowed"] else -math.inf for i, x in enumerate(row)]
    row = [-math.inf if i in p.get("banned", ()) else x for i, x in enumerate(row)]
    for i, bias in p.get("bias", {}).items():
        row[i] = float(np.float32(row[i] + bias))
    for i, count in p.get("history", {}).items():
        value = row[i]
        value = value / p["repetition_penalty"] if value > 0 else value * p["repetition_penalty"]
        value -= p["frequency_penalty"] * count
        value -= p["presence_penalty"] if count > 0 else 0.0
        row[i] = float(np.float32(value))
    return row


def draw(logits: Sequence[float], p: Mapping[str, Any]) -> int:
    """All the steps, for one row."""
    row = adjust(logits, p)
    largest = max(row)
    if p["temperature"] == 0:
        return row.index(largest)
    z = [(x - largest) / p["temperature"] for x in row]
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if p["top_k"] > 0:
        order = order[: p["top_k"]]
    if p["top_p"] < 1:
        mass = [math.floor(math.exp(z[i]) * 2.0**44) for i in order]
        total, prefix, length = sum(mass), 0, 0
        while not length or float(prefix) < p["top_p"] * float(total):
            prefix += mass[length]
            length += 1
        order = order[:length]
    if p["min_p"] > 0:
        order = [i for i in order if z[i] >= math.log(p["min_p"])]
    sums = {i: z[i] + gumbel(p["seed"], p["position"], i) for i in order}
    return min(order, key=lambda i: (-sums[i], i))


def asked_of(params: SamplingParams, prompt: Sequence[int], output: Sequence[int], eos: set[int]) -> dict[str, Any]:
    """What `params` ask of the row that follows prompt and output, in the terms of `draw`."""
    banned = {s[-1] for s in params.bad_words_token_ids if list(s[:-1]) == list(output)[len(output) - len(s) + 1 :]}
    if len(output) < params.min_tokens:
        banned |= {*params.stop_token_ids, *(set() if params.ignore_eos else eos)}
    history = dict.fromkeys(prompt if params.repetition_penalty != 1 else (), 0) | Counter(output)
    return params.model_dump() | {
        "allowed": params.allowed_token_ids,
        "banned": banned,
        "bias": params.logit_bias,
        "history": history,
        "position": len(prompt) + len(output),
    }
