"""The least time a program could take: for each op max(bytes / bandwidth, operations / peak), one op after another.

Counted are the bytes that can't be in a cache, weights and the KV of earlier tokens, once a step, and the operations of
products. What moves activations only counts as free. An op whose bytes a cache did hold may beat its floor. Greedy rows
of the LM head cost what its screen costs (`kernels/screen.py`) where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from batonq.engine.config import EngineConfig
from batonq.engine.engine import Engine, ModelSpec
from batonq.engine.loading import Frontend
from batonq.engine.models import LoadedModel
from batonq.engine.plan import Plan, Samples
from batonq.engine.runner import to_batch
from batonq.kernels.batch import Batch
from batonq.kernels.cpu_backend import SCREENING_ISAS
from batonq.kernels.cpu_library import best_isa
from batonq.kernels.program import Attention, DType, Embed, LmHead, Op, Program, Rows
from benchmarks.ceilings import Ceilings
from benchmarks.subjects import sampling
from benchmarks.workloads import Request


@dataclass(frozen=True)
class Cost:
    bytes_read: float = 0
    operations: float = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes_read + other.bytes_read, self.operations + other.operations)


def cost(op: Op, program: Program, batch: Batch) -> Cost:
    """What an op must read and compute for a batch."""
    if isinstance(op, Attention):
        return _attention_cost(op, program, batch.of_logits() if _of_logits(op, program) else batch)
    if isinstance(op, Embed) or not hasattr(op, "weight") or not hasattr(op, "out"):
        return Cost()
    weight = program.weights[op.weight]
    if len(weight.shape) != 2:
        return Cost()
    rows = len(batch.logits_rows if program.buffers[op.out].rows is Rows.LOGITS else batch.token_ids)
    size = weight.shape[0] * weight.shape[1]
    screened = batch.num_greedy if isinstance(op, LmHead) else 0
    return _product_cost(rows - screened, size, weight.dtype) + _screen_cost(screened, size, weight.dtype)


def _product_cost(rows: int, size: int, dtype: DType) -> Cost:
    return Cost(size * dtype.itemsize if rows else 0, 2 * rows * size)


def _screen_cost(rows: int, size: int, dtype: DType) -> Cost:
    """Digits of one byte: an instruction takes twice as many as of bfloat16, four times as many as of float32."""
    return Cost(size if rows else 0, 2 * rows * size / dtype.itemsize)


def _of_logits(op: Attention, program: Program) -> bool:
    return program.buffers[op.out].rows is Rows.LOGITS


def _attention_cost(op: Attention, program: Program, batch: Batch) -> Cost:
    if len(batch.token_ids) == 0:
        return Cost()
    cache = program.kv_cache
    seen = batch.positions + 1
    first = batch.positions[batch.query_start[:-1]] + 1
    low = np.zeros_like(first)
    if op.window:
        seen, low = np.minimum(seen, op.window), np.maximum(first - op.window, 0)
    # Slots of each block that some context sees: a block that several share is read once.
    starts = np.arange(batch.block_tables.shape[1]) * cache.block_size
    slots = [np.clip(end[:, None] - starts, 0, cache.block_size) for end in (batch.context_len, low)]
    read = np.zeros(int(batch.block_tables.max()) + 1, np.int64)
    np.maximum.at(read, batch.block_tables, slots[0] - slots[1])
    token_bytes = cache.bytes_per_block / cache.block_size / cache.layers
    return Cost(float(read.sum()) * token_bytes, 4.0 * op.q_heads * cache.head_dim * float(seen.sum(dtype=np.int64)))


def floor(total: Cost, program: Program, ceilings: Ceilings) -> float:
    """Seconds that an op of this cost takes at least."""
    return max(total.bytes_read / ceilings.bytes_read, total.operations / ceilings.operations(program.dtype))


def step_floor(program: Program, batch: Batch, ceilings: Ceilings) -> float:
    """Seconds that a batch takes at least."""
    alike = {replace(op, layer=0): op for op in program.ops if isinstance(op, Attention)}
    attention = {key: cost(op, program, batch) for key, op in alike.items()}
    costs = (
        attention[replace(op, layer=0)] if isinstance(op, Attention) else cost(op, program, batch) for op in program.ops
    )
    return sum(floor(each, program, ceilings) for each in costs)


class _Planner:
    """A runner and sampler that compute nothing, and add up the floor of the steps that are planned."""

    def __init__(self, program: Program, ceilings: Ceilings) -> None:
        self.program, self.ceilings, self.seconds = program, ceilings, 0.0

    def forward(self, plan: Plan) -> None:
        batch = to_batch(plan)
        if best_isa() not in SCREENING_ISAS:
            batch = replace(batch, num_greedy=0)
        self.seconds += step_floor(self.program, batch, self.ceilings)

    def sample(self, plan: Plan, logits: None) -> Samples:
        del logits
        return Samples([0] * len(plan.draws), [None] * len(plan.draws))


def workload_floor(
    model: LoadedModel, frontend: Frontend, config: EngineConfig, requests: Sequence[Request], ceilings: Ceilings
) -> float:
    """Seconds for the steps that our scheduler plans for these requests, beginning with an empty prefix cache.

    Every context gets one token a step: what right guesses save may go below this.
    """
    program = model.program
    spec = ModelSpec(
        model_id=model.name,
        max_model_len=model.max_model_len,
        vocab_size=program.vocab_size,
        eos_token_ids=frozenset(),
        block_size=program.kv_cache.block_size,
        bytes_per_block=program.kv_cache.bytes_per_block,
        numerics_id="floor",
        namespace=b"",
    )
    planner = _Planner(program, ceilings)
    engine = Engine(spec, replace(config, num_speculative_tokens=0), planner, planner, frontend, frontend.vocabulary)
    engine.generate([r.prompt_ids for r in requests], [sampling(r) for r in requests])
    return planner.seconds
