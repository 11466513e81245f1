"""The compiled sampler: against the one in torch over many draws, at the very borders of filters, on any threads."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from batonq.kernels import reference_sampling
from batonq.kernels.adjustments import Adjustment
from batonq.kernels.cpu_library import Team
from batonq.kernels.cpu_sampling import CpuSampler
from batonq.kernels.errors import BackendUnavailable, InvalidLogits
from batonq.kernels.logprobs import TokenLogprob
from batonq.kernels.sampling import SamplingBatch
from tests.support import samplers
from tests.support.sampling_contract import draw

Logits = npt.NDArray[np.float32]


@pytest.fixture(params=samplers.compiled())
def isa(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def random_logits(chance: np.random.Generator, count: int, vocabulary: int) -> Logits:
    """Rows from flat to peaked, some with many equal values, some with holes of -inf."""
    logits = chance.normal(size=(count, vocabulary)).astype(np.float32)
    logits *= chance.choice(np.array([0.0, 0.5, 2.0, 6.0], np.float32), (count, 1))
    tied = chance.random(count) < 0.3
    logits[tied] = np.round(logits[tied] * 2) / 2
    holes = (chance.random(count)[:, None] < 0.2) & (chance.random((count, vocabulary)) < 0.7)
    holes[:, chance.integers(vocabulary)] = False
    logits[holes] = -np.inf
    return logits


def random_batch(chance: np.random.Generator, count: int, vocabulary: int) -> SamplingBatch:
    return SamplingBatch(
        temperature=chance.choice([0.0, 1e-4, 0.3, 0.8, 1.0, 1.7, 1e5], count).tolist(),
        top_k=chance.choice([0, 0, 0, -1, 1, 7, 50, 300], count).tolist(),
        top_p=chance.choice([1.0, 1.0, 0.999999, 0.95, 0.8, 0.1, 1e-9], count).tolist(),
        min_p=chance.choice([0.0, 0.0, 0.0, 0.02, 0.4, 1.0], count).tolist(),
        seed=chance.integers(0, 2**64, count, dtype=np.uint64).tolist(),
        position=chance.integers(0, 2**31, count).tolist(),
        adjustments=[random_adjustment(chance, vocabulary) if i % 9 == 0 else None for i in range(count)],
    )


def random_adjustment(chance: np.random.Generator, vocabulary: int) -> Adjustment:
    ids = chance.permutation(min(vocabulary, 40)).astype(np.int32)
    third = len(ids) // 3
    return Adjustment(
        allowed=[*range(vocabulary)[-70:]] if chance.random() < 0.3 else None,
        banned=[*ids[:third].tolist(), vocabulary + 5],
        bias=dict(zip(ids[third:].tolist(), chance.normal(size=len(ids)).tolist(), strict=False)),
        repetition_penalty=1.3,
        presence_penalty=float(chance.normal()),
        frequency_penalty=0.25,
        history_ids=ids[::2],
        history_counts=chance.integers(0, 4, len(ids[::2]), dtype=np.int32),
    )


def plain(count: int, **changes: Any) -> SamplingBatch:
    """`count` rows with seeds of their own; a change is a value for all of them, or a list."""
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "position": 9, "adjustments": None} | changes
    columns = {name: value if isinstance(value, list) else [value] * count for name, value in given.items()}
    return SamplingBatch(**{"seed": [*range(count)]} | columns)


def assert_draws_what_torch_draws(chance: np.random.Generator, count: int, vocabulary: int) -> None:
    logits, params = random_logits(chance, count, vocabulary), random_batch(chance, count, vocabulary)
    expected = [said(one) for one in reference_sampling.sample(logits, params)]
    for isa in samplers.compiled():
        assert [said(one) for one in samplers.sampler(isa).sample(logits, params)] == expected, isa


def said(drawn: object) -> object:
    return drawn if isinstance(drawn, int) else repr(drawn)


@pytest.mark.parametrize(
    ("count", "vocabulary"),
    [(300, 1), (300, 2), (300, 17), (300, 64), (16_000, 65), (300, 128), (3000, 1023), (100, 49_152), (24, 151_936)],
)
def test_it_draws_what_torch_draws(count: int, vocabulary: int) -> None:
    assert_draws_what_torch_draws(np.random.default_rng(vocabulary), count, vocabulary)


@pytest.mark.soak
def test_a_million_draws() -> None:
    """Most from a vocabulary that torch looks at in one piece, for the time that it takes."""
    chance = np.random.default_rng(1)
    for vocabulary, count in ((65, 960_000), (777, 40_000)):
        for _ in range(count // 4000):
            assert_draws_what_torch_draws(chance, 4000, vocabulary)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_any_number_of_threads_draws_alike(isa: str, threads: int) -> None:
    chance = np.random.default_rng(3)
    logits, params = random_logits(chance, 70, 3000), random_batch(chance, 70, 3000)
    alone = [samplers.sampler(isa, 1).sample(logits[i : i + 1], rows_of(params, slice(i, i + 1)))[0] for i in range(70)]
    together = samplers.sampler(isa, threads).sample(logits, params)
    assert [one for one in together if isinstance(one, int)] == [one for one in alone if isinstance(one, int)]
    every, tokens, tops = [*range(70)], [*range(70)], [7] * 70
    many, one = (samplers.sampler(isa, n).token_logprobs(logits, every, tokens, tops) for n in (threads, 1))
    assert many == one


def rows_of(params: SamplingBatch, rows: slice) -> SamplingBatch:
    return SamplingBatch(**{field.name: getattr(params, field.name)[rows] for field in fields(params)})


@pytest.mark.parametrize(
    ("vocabulary", "scale"), [(1, 1.0), (300, 0.01), (300, 3.0), (6000, 1.0), (6000, 1e-6), (49_152, 1e-4)]
)
@pytest.mark.parametrize("temperature", [0.8, 1e-4, 1e6])
def test_a_token_is_in_or_out_at_the_very_border(isa: str, vocabulary: int, scale: float, temperature: float) -> None:
    """The filters are set so that the token that all the vocabulary would draw is the last that is kept, or the first
    that isn't."""
    count = 12
    sampler = samplers.sampler(isa)
    logits = (np.random.default_rng(5).normal(size=(count, vocabulary)) * scale * temperature).astype(np.float32)
    winners = [one for one in sampler.sample(logits, plain(count, temperature=temperature)) if isinstance(one, int)]
    found = [place(row, winner, temperature) for row, winner in zip(logits, winners, strict=True)]
    usable = [index for index, one in enumerate(found) if one.index > 0 and one.mass > 2**20]
    assert usable or vocabulary == 1
    logits, winners, found = logits[usable], [winners[i] for i in usable], [found[i] for i in usable]
    top_k = [one.index + 1 for one in found]
    top_p, top_p_below = ([(one.before + part * one.mass) / one.total for one in found] for part in (1e-3, -1e-3))
    min_p, min_p_above = ([math.exp(one.z) * part for one in found] for part in (1 - 1e-12, 1 + 1e-12))
    borders: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"top_k": top_k}, {"top_k": [one.index for one in found]}),
        ({"top_p": top_p}, {"top_p": top_p_below}),
        ({"min_p": min_p}, {"min_p": min_p_above}),
        ({"top_k": top_k, "min_p": min_p}, {"top_k": top_k, "min_p": min_p_above}),
        ({"top_p": top_p, "min_p": min_p}, {"top_p": top_p, "min_p": min_p_above}),
    ]
    for keeping, dropping in borders:
        asked = plain(len(usable), temperature=temperature, seed=usable)
        assert sampler.sample(logits, replace(asked, **keeping)) == winners, keeping.keys()
        dropped = sampler.sample(logits, replace(asked, **dropping))
        assert not any(one == winner for one, winner in zip(dropped, winners, strict=True)), keeping.keys()


@dataclass(frozen=True)
class Place:
    """Where a token stands: its index in the order, the lesser mass of it and the token before it, the masses of all
    before it and of the whole row, and its z."""

    index: int
    mass: int
    before: int
    total: int
    z: float


def place(row: Logits, token: int, temperature: float) -> Place:
    z = (row.astype(np.float64) - float(row.max())) / temperature
    order = np.argsort(-row, kind="stable")
    index = int(np.flatnonzero(order == token)[0])
    masses = [math.floor(math.exp(value) * 2.0**44) for value in z[order].tolist()]
    return Place(index, min(masses[max(index - 1, 0) : index + 1]), sum(masses[:index]), sum(masses), float(z[token]))


AWKWARD: dict[str, list[float]] = {
    "the smallest steps": [index * 1.4e-45 for index in range(200)],
    "the whole range": [3.4e38, -3.4e38, 0.0, *[3.3e38] * 90, *[-math.inf] * 40],
    "two far apart": [0.0, *[-1e30] * 150],
    "one and holes": [*[-math.inf] * 190, 5.0],
    "steps of one bit": [float(np.float32(20.0) + np.float32(index % 70) * np.float32(2**-19)) for index in range(300)],
    "both zeros": [0.0, -0.0] * 60,
}


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-7, 1.0, 1e6, 1e300])
def test_awkward_rows_are_drawn_by_the_contract(isa: str, name: str, temperature: float) -> None:
    row = np.array(AWKWARD[name], np.float32)
    filters: list[dict[str, float]] = [{}, {"top_p": 0.5}, {"top_p": 1 - 2.0**-53}, {"top_k": 60}, {"min_p": 0.9}]
    for asked in (*filters, {"top_k": 100, "top_p": 0.9}):
        batch = plain(3, temperature=temperature, **asked)
        found = samplers.sampler(isa).sample(np.stack([row] * 3), batch)
        p = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "position": 9} | asked
        assert found == [draw(row.tolist(), p | {"seed": seed}) for seed in range(3)], asked


def test_every_part_of_152k_tokens_is_drawn(isa: str) -> None:
    vocabulary, parts = 151_936, 64
    logits = np.zeros((40, vocabulary), np.float32)
    found = np.array([samplers.sampler(isa).sample(logits, plain(40, position=position)) for position in range(25)])
    drawn = found.ravel()
    assert drawn.min() >= 0
    assert drawn.max() < vocabulary
    assert (np.bincount(drawn * parts // vocabulary, minlength=parts) > 0).all()
    assert (np.bincount(drawn % 64, minlength=64) > 0).all()
    last = plain(1, adjustments=[Adjustment(allowed=[vocabulary - 1])])
    assert samplers.sampler(isa).sample(logits[:1], last) == [vocabulary - 1]


@pytest.mark.parametrize("vocabulary", [1, 2, 65, 1023, 49_152])
def test_log_probabilities_are_those_of_torch(isa: str, vocabulary: int) -> None:
    """The same ranks and alternatives; numbers equal but for the last bit."""
    chance = np.random.default_rng(7)
    logits = random_logits(chance, 12, vocabulary)
    rows = [*range(12), 3]
    tokens, tops = chance.integers(0, vocabulary, 13).tolist(), [min(i * 2, 20, vocabulary) for i in range(13)]
    found = samplers.sampler(isa).token_logprobs(logits, rows, tokens, tops)
    for mine, other in zip(found, reference_sampling.token_logprobs(logits, rows, tokens, tops), strict=True):
        assert not isinstance(mine, InvalidLogits)
        assert not isinstance(other, InvalidLogits)
        assert mine[1] == other[1]
        assert [i for i, _ in mine[2]] == [i for i, _ in other[2]]
        np.testing.assert_array_max_ulp(numbers(mine), numbers(other), maxulp=1)


def numbers(found: TokenLogprob) -> Logits:
    return np.array([found[0], *(value for _, value in found[2])], np.float32)


def test_ids_that_do_not_exist_are_refused(isa: str) -> None:
    sampler, logits = samplers.sampler(isa), np.zeros((1, 8), np.float32)
    one = np.array([8], np.int32)
    for wrong in (
        Adjustment(allowed=[8]),
        Adjustment(banned=[-1]),
        Adjustment(bias={8: 1.0}),
        Adjustment(history_ids=one, history_counts=one),
    ):
        with pytest.raises(IndexError):
            sampler.sample(logits, plain(1, adjustments=[wrong]))
    for rows, tokens, tops in (([1], [0], [0]), ([0], [8], [0]), ([0], [0], [9]), ([0], [-1], [0])):
        with pytest.raises(IndexError):
            sampler.token_logprobs(logits, rows, tokens, tops)


def test_an_instruction_set_that_is_not_here_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match="sse2"):
        CpuSampler(Team(1), "sse2")


def test_rows_of_an_array_that_is_not_contiguous(isa: str) -> None:
    logits = np.random.default_rng(8).normal(size=(700, 6)).astype(np.float32)
    sampler, params = samplers.sampler(isa), replace(plain(6), top_p=[0.9] * 6)
    assert sampler.sample(logits.T, params) == sampler.sample(logits.T.copy(), params)
