"""What SmolLM2 says of a text that ships with Python: in float32 as transformers does, in bfloat16 nearly so.

Everything runs through the compiled backend; logits are made a piece at a time, because a row of them takes 200 KB.
"""

from __future__ import annotations

from functools import cache
from pydoc_data.topics import topics

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from batonq.engine.loading import Frontend
from batonq.engine.models import load_model, resolve_model
from batonq.kernels.cpu_backend import CpuBackend
from tests.support.batches import Piece, blocks_of, make_batch
from tests.support.models import smollm2_dir
from tests.support.tiny_models import DTypeName

#: Tokens that see only those before them in the same window.
WINDOW = 1024
#: Rows whose logits are in memory at once.
PIECE = 256


@cache
def text_tokens(count: int) -> list[int]:
    text = "\n\n".join(topics[name].strip() for name in sorted(topics))
    tokens = Frontend(smollm2_dir()).encode(text[: 6 * count])[:count]
    assert len(tokens) == count
    return tokens


@pytest.fixture(scope="module")
def backends() -> dict[DTypeName, CpuBackend]:
    """SmolLM2 with a cache for one window, by dtype."""
    dtypes: tuple[DTypeName, ...] = ("float32", "bfloat16")
    models = {dtype: load_model(resolve_model("smollm2-135m"), dtype) for dtype in dtypes}
    return {dtype: CpuBackend(model.program, model.packed(), blocks_of(WINDOW)) for dtype, model in models.items()}


def log_probabilities(backend: CpuBackend, window: list[int]) -> npt.NDArray[np.float64]:
    """Of each token but the first, after those before it."""
    made = []
    for start in range(0, len(window), PIECE):
        end = min(start + PIECE, len(window))
        piece = Piece(window, start, end, range(blocks_of(len(window))))
        following = window[start + 1 : end + 1]
        logits = backend.forward(make_batch([piece])).values[: len(following)].astype(np.float64)
        largest = logits.max(axis=1)
        log_sums = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
        made.append(logits[np.arange(len(following)), following] - log_sums)
    return np.concatenate(made)


def perplexity(backend: CpuBackend, tokens: list[int]) -> float:
    windows = [tokens[start : start + WINDOW] for start in range(0, len(tokens), WINDOW)]
    return float(np.exp(-np.concatenate([log_probabilities(backend, window) for window in windows]).mean()))


@pytest.mark.parametrize("count", [2 * WINDOW, pytest.param(20 * WINDOW, marks=pytest.mark.soak)])
def test_bfloat16_is_as_perplexed_as_float32(backends: dict[DTypeName, CpuBackend], count: int) -> None:
    tokens = text_tokens(count)
    exact, rounded = (perplexity(backends[dtype], tokens) for dtype in ("float32", "bfloat16"))
    assert abs(rounded / exact - 1) < 0.003, (exact, rounded)


@pytest.fixture(scope="module")
def oracle() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(smollm2_dir(), dtype=torch.float32)
    return model


def test_log_probabilities_in_float32_are_those_of_transformers(
    oracle: PreTrainedModel, backends: dict[DTypeName, CpuBackend]
) -> None:
    tokens = text_tokens(WINDOW)[: PIECE + 10]
    with torch.no_grad():
        logits = oracle(torch.tensor([tokens])).logits[0, :-1].double()
    expected = logits.log_softmax(dim=-1)[torch.arange(len(tokens) - 1), tokens[1:]].numpy()
    np.testing.assert_allclose(log_probabilities(backends["float32"], tokens), expected, atol=2e-3)


def test_logits_in_bfloat16_are_as_near_to_float32_as_those_of_transformers(
    oracle: PreTrainedModel, backends: dict[DTypeName, CpuBackend]
) -> None:
    tokens = text_tokens(WINDOW)[:100]
    ids = torch.tensor([tokens])
    rounding = AutoModelForCausalLM.from_pretrained(smollm2_dir(), dtype=torch.bfloat16)
    with torch.no_grad():
        exact = oracle(ids).logits[0]
        theirs = rounding(ids).logits[0].float() - exact
    batch = make_batch([Piece(tokens, 0, len(tokens), range(blocks_of(len(tokens))))])
    ours = torch.from_numpy(backends["bfloat16"].forward(batch).values) - exact
    assert ours.abs().max() <= 2 * theirs.abs().max()
    assert ours.square().mean() < 1.2 * theirs.square().mean()
