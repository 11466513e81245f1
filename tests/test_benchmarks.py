"""What the benchmarks rest on: workloads of known sizes, floors that follow from the model, seconds of each op."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batonq.kernels import probe
from batonq.kernels.batch import Batch
from batonq.kernels.cpu_backend import CpuBackend
from batonq.kernels.packed import PackedWeights
from batonq.kernels.program import Attention, Buffer, DType, Linear, LinearAdd, LmHead, Rows
from benchmarks.ceilings import Ceilings
from benchmarks.floor import Cost, cost, step_floor
from benchmarks.workloads import SHAPES, cold, from_row, generated, read_workload, write_workload
from tests.support.batches import Piece, make_batch

PROGRAM = probe.program(DType.BFLOAT16)


def characters(text: str) -> list[int]:
    return list(map(ord, text))


def test_a_workload_has_the_tokens_that_its_shape_says() -> None:
    totals = {}
    for name, shape in SHAPES.items():
        requests = generated(characters, shape)
        totals[name] = (len(requests), sum(len(r.prompt_ids) for r in requests), sum(r.max_tokens for r in requests))
        assert requests == generated(characters, shape)
        assert requests != generated(characters, shape, seed=0)
    assert totals == {
        "w1_nano": (64, 8421, 9274),
        "w2_dataset": (256, 64074, 16384),
        "w3_long": (4, 16384, 512),
        "w4_single": (1, 64, 256),
        "warm": (4, 128, 32),
    }


def test_a_shared_prefix_is_shared_and_nothing_else_is() -> None:
    requests = generated(characters, SHAPES["w2_dataset"])
    assert len({tuple(r.prompt_ids[:200]) for r in requests}) == 1
    assert len({tuple(r.prompt_ids[200:220]) for r in requests}) > 250
    changed = cold(requests)
    assert {r.prompt_ids[0] for r in changed}.isdisjoint(r.prompt_ids[0] for r in cold(requests))
    assert [r.prompt_ids[1:] for r in changed] == [r.prompt_ids[1:] for r in requests]


def test_a_workload_survives_a_file(tmp_path: Path) -> None:
    requests = generated(characters, SHAPES["w2_dataset"])
    path = tmp_path / "w.jsonl"
    write_workload(path, requests)
    assert read_workload(path) == requests
    assert read_workload(path, 3) == requests[:3]
    row = json.loads(path.read_text().splitlines()[0])
    assert (row["id"], row["temperature"], row["top_p"], row["ignore_eos"]) == (0, 0.8, 0.95, True)
    with pytest.raises(ValueError, match="EOS"):
        from_row({**row, "ignore_eos": False})


def batch(*pieces: tuple[int, int, list[int]]) -> Batch:
    tokens = random.Random(0).choices(range(PROGRAM.vocab_size), k=200)
    return make_batch([Piece(tokens, start, end, blocks) for start, end, blocks in pieces])


def test_attention_reads_a_shared_block_once_and_no_slot_that_is_empty() -> None:
    op = next(op for op in PROGRAM.ops if isinstance(op, Attention))
    cache = PROGRAM.kv_cache
    token_bytes = 2 * cache.kv_heads * cache.head_dim * 2
    # 40 tokens and 35 tokens, the first 32 of which are the same.
    shared = cost(replace(op, window=0), PROGRAM, batch((39, 40, [1, 2]), (33, 35, [1, 3])))
    assert shared.bytes_read == (32 + 8 + 3) * token_bytes
    assert shared.operations == 4 * op.q_heads * cache.head_dim * (40 + 34 + 35)
    # The last 4 of 40 tokens; of 35 tokens the 5 that the last two see, 2 of them in the shared block.
    windowed = cost(replace(op, window=4), PROGRAM, batch((39, 40, [1, 2]), (33, 35, [1, 3])))
    assert windowed.bytes_read == (2 + 4 + 3) * token_bytes
    assert windowed.operations == 4 * op.q_heads * cache.head_dim * (4 + 4 + 4)


def test_attention_of_rows_with_logits_reads_what_those_see() -> None:
    buffer, cache = len(PROGRAM.buffers), PROGRAM.kv_cache
    op = next(op for op in PROGRAM.ops if isinstance(op, Attention))
    of_logits = replace(PROGRAM, buffers=(*PROGRAM.buffers, Buffer("rows", Rows.LOGITS, 1, DType.BFLOAT16)))
    work = replace(batch((0, 40, [1, 2]), (0, 35, [3, 4])), logits_rows=np.array([39], np.int32))
    got = cost(replace(op, out=buffer), of_logits, work)
    assert got == Cost(40 * 2 * cache.kv_heads * cache.head_dim * 2, 4 * op.q_heads * cache.head_dim * 40)
    assert cost(replace(op, out=buffer), of_logits, replace(work, logits_rows=work.logits_rows[:0])) == Cost()


def test_a_product_reads_its_matrix_once_and_computes_it_for_each_row() -> None:
    work = batch((0, 7, [1]), (0, 5, [2]))
    work = replace(work, logits_rows=np.array([6, 11], np.int32))
    linear = next(op for op in PROGRAM.ops if isinstance(op, Linear | LinearAdd))
    rows, columns = PROGRAM.weights[linear.weight].shape
    assert cost(linear, PROGRAM, work) == Cost(rows * columns * 2, 2 * 12 * rows * columns)
    head = next(op for op in PROGRAM.ops if isinstance(op, LmHead))
    rows, columns = PROGRAM.weights[head.weight].shape
    assert cost(head, PROGRAM, work) == Cost(rows * columns * 2, 2 * 2 * rows * columns)
    # The screen has a byte where a weight has two.
    assert cost(head, PROGRAM, replace(work, num_greedy=1)) == Cost(rows * columns * 3, (2 + 1) * rows * columns)
    assert cost(head, PROGRAM, replace(work, num_greedy=2)) == Cost(rows * columns, 2 * rows * columns)


def test_a_floor_is_bound_by_what_is_scarce() -> None:
    work = batch((0, 7, [1]))
    costs = [cost(op, PROGRAM, work) for op in PROGRAM.ops]
    slow_memory, slow_units = Ceilings(1, 1e30, 1e30), Ceilings(1e30, 1e30, 2)
    assert step_floor(PROGRAM, work, slow_memory) == pytest.approx(sum(each.bytes_read for each in costs))
    assert step_floor(PROGRAM, work, slow_units) == pytest.approx(sum(each.operations for each in costs) / 2)


def test_seconds_of_ops_are_counted_while_asked_for_and_not_otherwise() -> None:
    weights = PackedWeights.pack(PROGRAM, probe.weights(PROGRAM.dtype).get)
    backend = CpuBackend(PROGRAM, weights, probe.NUM_BLOCKS, 2)

    def seconds(*, on: bool) -> list[float]:
        backend.forward(batch((0, 7, [1])))
        return [each for _, each in backend.profile(on=on)]

    assert set(seconds(on=True)) == {0.0}
    assert min(seconds(on=True)) > 0
    assert min(seconds(on=False)) > 0
    assert set(seconds(on=False)) == {0.0}
