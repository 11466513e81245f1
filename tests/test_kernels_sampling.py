"""Samplers against their contract, spelt out one number at a time, and against the softmax they should draw from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from batonq.engine.sampler import SamplingArithmetic
from batonq.kernels.adjustments import Adjustment
from batonq.kernels.errors import InvalidLogits, NoCandidates
from batonq.kernels.philox import MAX_GUMBEL, gumbel, philox4x32
from batonq.kernels.reference_sampling import adjusted
from batonq.kernels.sampling import SamplingBatch
from tests.support import samplers
from tests.support.sampling_contract import adjust, draw


@pytest.fixture(params=["torch", *samplers.compiled()])
def sampler(request: pytest.FixtureRequest) -> SamplingArithmetic:
    return samplers.sampler(request.param)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # kat_vectors of Random123, "philox4x32 10"
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: Any, key: Any, expected: Any) -> None:
    assert philox4x32(counter, key) == expected


def test_the_largest_gumbel() -> None:
    assert math.isclose(-math.log(-math.log((2**32 - 0.5) * 2.0**-32)), MAX_GUMBEL, abs_tol=1e-9)


FILTERS = ("temperature", "top_k", "top_p", "min_p", "seed", "position")


def batch_of(rows: list[dict[str, Any]]) -> SamplingBatch:
    adjustments = [adjustment_of(row) for row in rows]
    return SamplingBatch(**{name: [row[name] for row in rows] for name in FILTERS}, adjustments=adjustments)


def adjustment_of(row: dict[str, Any]) -> Adjustment | None:
    given = {name: row[name] for name in Adjustment.__slots__ if name in row}
    if row.get("history"):
        given["history_ids"] = np.array(list(row["history"]), np.int32)
        given["history_counts"] = np.array(list(row["history"].values()), np.int32)
    return Adjustment(**given) if given else None


def parameters(vocabulary: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 1e-300, 0.01, 0.7, 1.0, 3.0, 1e6]),
            "top_k": st.sampled_from([-1, 0, 1, 2, 5, 63, 64, 65, 70, 100, 1100, 2000]),
            "top_p": st.sampled_from([1.0, 0.999999, 0.95, 0.5, 0.01, 1e-12]),
            "min_p": st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
            "seed": st.sampled_from([0, 1, 2**32, 2**64 - 1, 0x0123456789ABCDEF]),
            "position": st.integers(0, 2**31 - 1),
        }
    ).flatmap(lambda filters: st.builds(lambda p: filters | p, adjustments(vocabulary)))


def adjustments(vocabulary: int) -> st.SearchStrategy[dict[str, Any]]:
    ids = st.integers(0, vocabulary - 1)
    penalties = {
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5, 7.0, 1e-6, 1e6]),
        "presence_penalty": st.sampled_from([0.0, 0.7, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.1, 2.0, -1.5]),
        "history": st.dictionaries(ids, st.integers(0, 5), max_size=12),
    }
    optional = {
        "allowed": st.lists(ids, min_size=1, max_size=80, unique=True),
        "banned": st.lists(st.integers(0, vocabulary + 3), max_size=4),
        "bias": st.dictionaries(ids, st.sampled_from([-100.0, 100.0, 0.1, -3.7, 1e-30]), max_size=6),
    }
    masks = st.fixed_dictionaries({}, optional=optional)
    return masks | st.builds(lambda a, b: a | b, masks, st.fixed_dictionaries(penalties))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_every_row_is_drawn_by_the_contract(data: st.DataObject) -> None:
    vocabulary = data.draw(st.sampled_from([1, 2, 7, 64, 65, 66, 200, 1026, 1500]))
    count = data.draw(st.integers(1, 4))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows = [data.draw(parameters(vocabulary)) for _ in range(count)]
    logits = generator.normal(size=(count, vocabulary)).astype(np.float32) * data.draw(
        st.sampled_from([0.0, 0.1, 1.0, 4.0, 30.0])
    )
    if data.draw(st.booleans()):
        logits = np.round(logits * 2) / 2  # many ties
    if data.draw(st.booleans()):
        holes = generator.random(logits.shape) < 0.5
        holes[np.arange(count), generator.integers(0, vocabulary, count)] = False
        logits[holes] = -np.inf
    for row, p in zip(logits, rows, strict=True):
        if max(adjust(row.tolist(), p)) == -math.inf:
            p.pop("allowed", None)
            p.pop("banned", None)
    expected = [draw(row.tolist(), p) for row, p in zip(logits, rows, strict=True)]
    for name in ("torch", *samplers.compiled()):
        assert samplers.sampler(name).sample(logits, batch_of(rows)) == expected, name


PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5, "position": 9}

NO_IDS: Any = torch.zeros(1, 0, dtype=torch.long)
#: A prompt of tokens 0 and 1, an output of 8, 9 and 9.
SEEN = torch.tensor([[0, 1, 8, 9, 9]])
COUNTS = torch.zeros(24).index_add(0, torch.tensor([8, 9, 9]), torch.ones(3))
PENALTIES = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "history": {0: 0, 1: 0, 8: 1, 9: 2},
}


@pytest.mark.parametrize("scale", [0.0, 1.0, 6.0])
def test_a_large_vocabulary_is_drawn_by_the_contract(sampler: SamplingArithmetic, scale: float) -> None:
    logits = torch.randn(6, 9000, generator=torch.Generator().manual_seed(1)) * scale
    changes: list[dict[str, Any]] = [
        {},
        {"min_p": 1e-4},
        {"top_p": 0.9},
        {"top_k": 3000},
        {"top_k": 1500, "top_p": 0.8},
    ]
    for change in changes:
        rows = [PLAIN | change | {"seed": seed} for seed in range(6)]
        expected = [draw(row.tolist(), p) for row, p in zip(logits, rows, strict=True)]
        assert sampler.sample(logits.numpy(), batch_of(rows)) == expected


def test_a_row_does_not_depend_on_the_others(sampler: SamplingArithmetic) -> None:
    logits = (torch.randn(12, 3000, generator=torch.Generator().manual_seed(2)) * 3).numpy()
    rows = [
        PLAIN | {"temperature": index % 3 * 0.7, "top_p": (1.0, 0.9)[index % 2], "top_k": (0, 20, 900)[index % 3]}
        for index in range(12)
    ]
    together = sampler.sample(logits, batch_of(rows))
    assert [sampler.sample(logits[i : i + 1], batch_of([rows[i]]))[0] for i in range(12)] == together
    assert sampler.sample(logits[::-1].copy(), batch_of(rows[::-1])) == together[::-1]


DRAWS = 120_000

#: Of a row of logits: what is asked for, and how transformers, or two lines of numpy, give the distribution.
DISTRIBUTIONS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "plain": ({}, lambda x: x),
    "temperature": ({"temperature": 0.6}, lambda x: TemperatureLogitsWarper(0.6)(NO_IDS, x)),
    "top_k": ({"top_k": 5}, lambda x: TopKLogitsWarper(5)(NO_IDS, x)),
    "top_p": ({"top_p": 0.8}, lambda x: TopPLogitsWarper(0.8)(NO_IDS, x)),
    "min_p": ({"min_p": 0.05}, lambda x: MinPLogitsWarper(0.05)(NO_IDS, x)),
    "bias": ({"bias": {3: 2.5, 7: -1.0}}, lambda x: SequenceBiasLogitsProcessor([[[3], 2.5], [[7], -1.0]])(NO_IDS, x)),
    "allowed": (
        {"allowed": [1, 2, 9]},
        lambda x: SuppressTokensLogitsProcessor([0, *range(3, 9), *range(10, 24)])(NO_IDS, x),
    ),
    "banned": ({"banned": [0, 5]}, lambda x: SuppressTokensLogitsProcessor([0, 5])(NO_IDS, x)),
    "repetition": (
        PENALTIES | {"repetition_penalty": 1.5},
        lambda x: RepetitionPenaltyLogitsProcessor(1.5)(SEEN, x),
    ),
    "presence": (PENALTIES | {"presence_penalty": 1.2}, lambda x: x - 1.2 * (COUNTS > 0)),
    "frequency": (PENALTIES | {"frequency_penalty": 0.4}, lambda x: x - 0.4 * COUNTS),
    "all": (
        PENALTIES
        | {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "temperature": 1.7, "top_k": 15, "top_p": 0.9},
        lambda x: TopPLogitsWarper(0.9)(
            NO_IDS, TopKLogitsWarper(15)(NO_IDS, (RepetitionPenaltyLogitsProcessor(1.5)(SEEN, x) - 0.4 * COUNTS) / 1.7)
        ),
    ),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_frequencies_are_those_of_an_independent_implementation(sampler: SamplingArithmetic, name: str) -> None:
    asked, distribution = DISTRIBUTIONS[name]
    logits = torch.randn(1, 24, generator=torch.Generator().manual_seed(3)) * 1.5
    row = PLAIN | asked | {"seed": 11}
    counts = np.zeros(24)
    # A row's adjustment is the same in every draw, so it is made once.
    same = adjusted(logits, [adjustment_of(row)]).expand(DRAWS // 4, -1).contiguous().numpy()
    for part in range(4):
        params = SamplingBatch(
            **{key: [row[key]] * len(same) for key in FILTERS if key != "position"},
            position=range(part * len(same), (part + 1) * len(same)),
            adjustments=[None] * len(same),
        )
        counts += np.bincount(np.array(sampler.sample(same, params)), minlength=24)
    expected = torch.softmax(distribution(logits.double())[0], 0).numpy() * DRAWS
    assert counts[expected == 0].sum() == 0
    some = expected > 0
    chi_square = float(((counts[some] - expected[some]) ** 2 / expected[some]).sum())
    assert chi_square < chi_square_bound(int(some.sum()) - 1), chi_square


def chi_square_bound(freedom: int) -> float:
    """What one in a thousand exceeds (Wilson and Hilferty's approximation); the draws are fixed by the seed."""
    spread = 2.0 / (9.0 * freedom)
    return freedom * (1.0 - spread + 3.0902 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize("scale", [0.0, 1.0, 5.0])
def test_log_probabilities(sampler: SamplingArithmetic, scale: float) -> None:
    """Against log_softmax in float64 and Python's own sort; a row's don't depend on its neighbours."""
    logits = torch.randn(19, 3000, generator=torch.Generator().manual_seed(4)) * scale
    logits = (logits * 4).round() / 4  # many ties
    logits[5, 3:] = -math.inf
    logits[9, 77] = math.nan
    rows = [*range(18, -1, -1), 4]
    tokens = [7 * row for row in rows]
    num_top = [row % 6 for row in rows]
    found = sampler.token_logprobs(logits.numpy(), rows, tokens, num_top)
    for row, token, count, one in zip(rows, tokens, num_top, found, strict=True):
        if row == 9:
            assert isinstance(one, InvalidLogits)
            assert math.isnan(one.value)
            continue
        assert not isinstance(one, InvalidLogits)
        logprob, rank, top = one
        exact = logits[row].double().log_softmax(0)
        order = sorted(range(3000), key=lambda i: (-float(logits[row, i]), i))
        assert rank == order.index(token) + 1
        assert [i for i, _ in top] == order[:count]
        for i, value in ((token, logprob), *top):
            assert value == pytest.approx(float(exact[i]), abs=1e-6, rel=1e-6)
        assert sampler.token_logprobs(logits[row : row + 1].numpy(), [0], [token], [count]) == [one]


def test_banned_tokens_are_not_drawn_and_the_logits_stay(sampler: SamplingArithmetic) -> None:
    logits = np.array([[5.0, 4.0, 3.0]], np.float32)
    assert sampler.sample(logits, batch_of([PLAIN | {"temperature": 0.0, "banned": [0, 1, 77]}])) == [2]
    assert logits.tolist() == [[5.0, 4.0, 3.0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", [0, 20, 40, 60, 130, 199])
def test_rows_without_a_largest_logit_fail_alone(sampler: SamplingArithmetic, temperature: float, place: int) -> None:
    logits = np.zeros((5, 200), np.float32)
    params = batch_of([PLAIN | {"temperature": temperature}] * 5)
    usable = sampler.sample(logits, params)
    logits[1, place] = math.nan
    logits[3, place] = math.inf
    first, nan, third, inf, none = sampler.sample(
        logits, replace(params, adjustments=[*[None] * 4, Adjustment(banned=range(200))])
    )
    assert [first, third] == [usable[0], usable[2]]
    assert isinstance(nan, InvalidLogits)
    assert isinstance(inf, InvalidLogits)
    assert isinstance(none, NoCandidates)
    assert (nan.row, inf.row, none.row, inf.value) == (1, 3, 4, math.inf)
    assert math.isnan(nan.value)


def test_the_lowest_id_among_equal_sums(sampler: SamplingArithmetic) -> None:
    """Two tokens whose 32 random bits are the same by chance."""
    seed, position, vocabulary, pair = 5, 9, 152_000, (432, 94_710)
    assert gumbel(seed, position, pair[0]) == gumbel(seed, position, pair[1])
    for top_p in (1.0, 0.99):
        row = PLAIN | {"seed": seed, "position": position, "allowed": pair[::-1], "top_p": top_p}
        assert sampler.sample(np.zeros((1, vocabulary), np.float32), batch_of([row])) == [pair[0]]


def test_an_unusable_logit_that_is_ruled_out_hurts_nobody(sampler: SamplingArithmetic) -> None:
    logits = np.array([[math.nan, 2.0, 1.0], [0.0, 1.0, math.inf]], np.float32)
    rows = [PLAIN | {"temperature": 0.0, "banned": [0]}, PLAIN | {"temperature": 0.0, "allowed": [0, 1]}]
    assert sampler.sample(logits, batch_of(rows)) == [1, 1]


def test_no_rows(sampler: SamplingArithmetic) -> None:
    assert sampler.sample(np.zeros((0, 5), np.float32), batch_of([])) == []
    assert sampler.token_logprobs(np.zeros((0, 5), np.float32), [], [], []) == []
