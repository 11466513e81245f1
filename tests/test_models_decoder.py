"""Programs of all families against transformers in float32, and against itself bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batonq.engine.models import LoadedModel, ModelSource, load_model
from batonq.kernels.backend import Backend, make_backend
from batonq.kernels.reference import ReferenceBackend
from tests.support import models, tiny_models
from tests.support.batches import Piece, blocks_of, fill_with_nan, forward, make_batch

NUM_BLOCKS = 40


def tokens_of(length: int, vocab: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, length)]


def scattered(count: int, seed: int) -> list[int]:
    return [int(block) for block in np.random.default_rng(seed).permutation(NUM_BLOCKS)[:count]]


def run_in_chunks(backend: ReferenceBackend, tokens: list[int], blocks: list[int], cuts: list[int]) -> torch.Tensor:
    edges = [0, *sorted(set(cuts)), len(tokens)]
    return torch.cat(
        [
            forward(backend, make_batch([Piece(tokens, start, end, blocks)]))
            for start, end in pairwise(edges)
            if start < end
        ]
    )


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = tmp_path_factory.mktemp("gqa3")
    tiny_models.save("gqa3-untied", directory)
    return load_model(ModelSource("tiny", directory))


@pytest.mark.parametrize("variant", tiny_models.VARIANTS)
def test_logits_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    oracle = tiny_models.save(variant, tmp_path)
    model = load_model(ModelSource("tiny", tmp_path))
    tokens = tokens_of(150, model.program.vocab_size, 1)
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens])).logits[0]
    backend = ReferenceBackend(model.program, model.tensors(), NUM_BLOCKS)
    fill_with_nan(backend)
    blocks = scattered(blocks_of(150), 2)
    for cuts in ([], [1], [32, 64, 65, 66, 149], [7, 100], list(range(100, 150))):
        torch.testing.assert_close(run_in_chunks(backend, tokens, blocks, cuts), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", tiny_models.FAMILIES.values(), ids=tiny_models.FAMILIES)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_neighbours_chunks_and_places_do_not_change_a_bit(
    variant: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from(["float32", "bfloat16"]))
    directory = tmp_path_factory.getbasetemp() / f"neighbours-{variant}"
    if not directory.is_dir():
        tiny_models.save(variant, directory)
    model = load_model(ModelSource("tiny", directory), dtype)  # type: ignore[arg-type]
    lengths = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=5))
    sequences = [tokens_of(length, model.program.vocab_size, index) for index, length in enumerate(lengths)]
    alone = []
    for tokens in sequences:
        backend = ReferenceBackend(model.program, model.tensors(), NUM_BLOCKS)
        alone.append(run_in_chunks(backend, tokens, list(range(blocks_of(len(tokens)))), []))

    together = ReferenceBackend(model.program, model.tensors(), NUM_BLOCKS)
    fill_with_nan(together)
    free = scattered(NUM_BLOCKS, data.draw(st.integers(0, 100)))
    tables = [[free.pop() for _ in range(blocks_of(length))] for length in lengths]
    done = [0] * len(lengths)
    got: list[list[torch.Tensor]] = [[] for _ in lengths]
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        running = [index for index, length in enumerate(lengths) if done[index] < length]
        ends = [done[i] + data.draw(st.integers(1, lengths[i] - done[i])) for i in running]
        pieces = [Piece(sequences[i], done[i], end, tables[i]) for i, end in zip(running, ends, strict=True)]
        parts = torch.split(forward(together, make_batch(pieces)), [piece.end - piece.start for piece in pieces])
        for index, end, part in zip(running, ends, parts, strict=True):
            got[index].append(part)
            done[index] = end
    for expected, parts_of_one in zip(alone, got, strict=True):
        assert torch.equal(torch.cat(parts_of_one), expected)


def test_many_decodes_at_once_are_as_alone(loaded: LoadedModel) -> None:
    lengths = [1, 2, 31, 32, 33, 64, 65, 90, 150, 3]
    backend = ReferenceBackend(loaded.program, loaded.tensors(), NUM_BLOCKS)
    fill_with_nan(backend)
    free = scattered(NUM_BLOCKS, 5)
    pieces = []
    for seed, length in enumerate(lengths):
        tokens = tokens_of(length, loaded.program.vocab_size, seed)
        blocks = [free.pop() for _ in range(blocks_of(length))]
        pieces.append(Piece(tokens, length - 1, length, blocks))
        if length > 1:
            assert forward(backend, make_batch([Piece(tokens, 0, length - 1, blocks, logits=False)])).shape == (0, 160)
    together = forward(backend, make_batch(pieces))
    for row, piece in zip(together, pieces, strict=True):
        assert torch.equal(forward(backend, make_batch([piece]))[0], row)


def test_a_sequence_may_read_a_block_that_another_fills_in_the_same_batch(loaded: LoadedModel) -> None:
    tokens = tokens_of(50, loaded.program.vocab_size, 3)
    backend = ReferenceBackend(loaded.program, loaded.tensors(), NUM_BLOCKS)
    expected = forward(backend, make_batch([Piece(tokens, 0, 50, [0, 1])]))
    fill_with_nan(backend)
    shared = [Piece(tokens, 32, 50, [7, 9]), Piece(tokens, 0, 32, [7], logits=False)]
    assert torch.equal(forward(backend, make_batch(shared)), expected[32:])


def test_the_number_of_threads_does_not_change_a_bit(loaded: LoadedModel) -> None:
    tokens = tokens_of(90, loaded.program.vocab_size, 4)
    before = torch.get_num_threads()
    try:
        one, two = (
            forward(
                ReferenceBackend(loaded.program, loaded.tensors(), 3, threads),
                make_batch([Piece(tokens, 0, 90, [2, 0, 1])]),
            )
            for threads in (1, 2)
        )
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, two)


def test_a_query_only_token_has_the_same_logits_and_stores_nothing(loaded: LoadedModel) -> None:
    tokens = tokens_of(64, loaded.program.vocab_size, 9)
    backend = ReferenceBackend(loaded.program, loaded.tensors(), 3)
    expected = forward(backend, make_batch([Piece(tokens, 0, 64, [2, 0])]))
    backend.keys[:, 0, :, 31] += 1
    backend.values[:, 0, :, 31] -= 1
    changed = backend.keys.clone(), backend.values.clone()
    query_only = Piece(tokens, 63, 64, [2, 0], query_only=True)
    assert not torch.equal(forward(backend, make_batch([query_only])), expected[-1:])
    assert torch.equal(backend.keys, changed[0])
    assert torch.equal(backend.values, changed[1])
    forward(backend, make_batch([Piece(tokens, 32, 64, [2, 0])]))
    assert torch.equal(forward(backend, make_batch([query_only])), expected[-1:])
    # Beside others, and in the same batch as the sequence that stores what it reads.
    fill_with_nan(backend)
    writer = Piece(tokens, 0, 64, [2, 0], logits=False)
    assert torch.equal(forward(backend, make_batch([query_only, writer])), expected[-1:])


@pytest.mark.parametrize(
    "make",
    [
        lambda model: ReferenceBackend(model.program, model.tensors(), 2),
        lambda model: make_backend(model.program, model, 2),
    ],
    ids=["reference", "compiled"],
)
@pytest.mark.parametrize("variant", tiny_models.FAMILIES.values(), ids=tiny_models.FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(
    variant: str, make: Callable[[LoadedModel], Backend], tmp_path: Path
) -> None:
    oracle = tiny_models.save(variant, tmp_path)
    tokens = tokens_of(60, 160, 6)
    with torch.no_grad():
        exact = oracle(torch.tensor([tokens])).logits[0]
        oracle.to(dtype=torch.bfloat16)  # type: ignore[call-arg]
        theirs = oracle(torch.tensor([tokens])).logits[0].float()
    model = load_model(ModelSource("tiny", tmp_path), "bfloat16")
    ours = forward(make(model), make_batch([Piece(tokens, 0, 60, [1, 0])]))
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()
    assert (ours - exact).square().mean() < 1.5 * (theirs - exact).square().mean()


def test_smollm2_continues_as_transformers_does() -> None:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 (slow to import, and needed here alone)

    model = models.smollm2()
    oracle = AutoModelForCausalLM.from_pretrained(model.directory)
    tokens = tokens_of(40, 49152, 8)
    backend = ReferenceBackend(model.program, model.tensors(), 4)
    logits = forward(backend, make_batch([Piece(tokens, 0, 40, [3, 1])]))
    with torch.no_grad():
        output = oracle(torch.tensor([tokens]))
        torch.testing.assert_close(logits, output.logits[0], atol=2e-3, rtol=1e-3)
        generated = oracle.generate(torch.tensor([tokens]), max_new_tokens=24, do_sample=False, eos_token_id=-1)
    for expected in generated[0, 40:].tolist():
        assert int(logits[-1].argmax()) == expected
        tokens.append(expected)
        logits = forward(backend, make_batch([Piece(tokens, len(tokens) - 1, len(tokens), [3, 1])]))
