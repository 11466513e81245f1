"""The sampler against its contract, spelt out one number at a time, and against the softmax it should draw from."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batonq.kernels.errors import InvalidLogits, NoCandidates
from batonq.kernels.philox import MAX_GUMBEL, gumbel, philox4x32
from batonq.kernels.sampling import SamplingBatch, sample


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


def draw_by_the_contract(logits: list[float], p: dict[str, Any]) -> int:
    """Steps 1 to 7 of the module's docstring, for one row."""
    row = [-math.inf if i in p["banned"] else x for i, x in enumerate(logits)]
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


def batch_of(rows: list[dict[str, Any]]) -> SamplingBatch:
    return SamplingBatch(**{name: [row[name] for row in rows] for name in SamplingBatch.__slots__})


def parameters(vocabulary: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 1e-300, 0.01, 0.7, 1.0, 3.0, 1e6]),
            "top_k": st.sampled_from([-1, 0, 1, 2, 5, 63, 64, 65, 70, 100, 1100, 2000]),
            "top_p": st.sampled_from([1.0, 0.999999, 0.95, 0.5, 0.01, 1e-12]),
            "min_p": st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
            "seed": st.sampled_from([0, 1, 2**32, 2**64 - 1, 0x0123456789ABCDEF]),
            "position": st.integers(0, 2**31 - 1),
            "banned": st.lists(st.integers(0, vocabulary + 3), max_size=min(4, vocabulary - 1), unique=True),
        }
    )


@settings(max_examples=400, deadline=None)
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
        p["banned"] = [i for i in p["banned"] if i >= vocabulary or np.isfinite(np.delete(row, i)).any()]
        masked = row.copy()
        masked[[i for i in p["banned"] if i < vocabulary]] = -np.inf
        if not np.isfinite(masked).any():
            p["banned"] = []
    expected = [draw_by_the_contract(row.tolist(), p) for row, p in zip(logits, rows, strict=True)]
    assert sample(torch.from_numpy(logits), batch_of(rows)) == expected


PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5, "position": 9, "banned": ()}


@pytest.mark.parametrize("scale", [0.0, 1.0, 6.0])
def test_a_large_vocabulary_is_drawn_by_the_contract(scale: float) -> None:
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
        expected = [draw_by_the_contract(row.tolist(), p) for row, p in zip(logits, rows, strict=True)]
        assert sample(logits, batch_of(rows)) == expected


def test_a_row_does_not_depend_on_the_others() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(12, 3000, generator=generator) * 3
    rows = [
        PLAIN | {"temperature": index % 3 * 0.7, "top_p": (1.0, 0.9)[index % 2], "top_k": (0, 20, 900)[index % 3]}
        for index in range(12)
    ]
    together = sample(logits, batch_of(rows))
    assert [sample(logits[i : i + 1], batch_of([rows[i]]))[0] for i in range(12)] == together
    assert sample(logits.flip(0), batch_of(rows[::-1])) == together[::-1]


def test_frequencies_are_those_of_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.0, -0.5])
    draws = 20_000
    params = batch_of([PLAIN | {"seed": 11, "position": position} for position in range(draws)])
    counts = np.bincount(sample(logits.expand(draws, -1), params), minlength=8)
    expected = torch.softmax(logits.double(), 0).numpy() * draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 24.3  # 7 degrees of freedom, p = 0.001; the draw is fixed by the seed


def test_banned_tokens_are_not_drawn_and_the_logits_stay() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0]])
    assert sample(logits, batch_of([PLAIN | {"temperature": 0.0, "banned": [0, 1, 77]}])) == [2]
    assert logits.tolist() == [[5.0, 4.0, 3.0]]


def test_rows_without_a_largest_logit_are_named() -> None:
    logits = torch.zeros(3, 5)
    params = batch_of([PLAIN] * 3)
    for value in (math.nan, math.inf):
        bad = logits.clone()
        bad[1, 3] = value
        with pytest.raises(InvalidLogits, match=f"row 1 .* {value}") as caught:
            sample(bad, params)
        assert caught.value.row == 1
    with pytest.raises(NoCandidates, match="row 2"):
        sample(logits, replace(params, banned=[(), (), range(5)]))


def test_no_rows() -> None:
    assert sample(torch.zeros(0, 5), batch_of([])) == []
