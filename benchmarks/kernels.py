"""Each kind of op of SmolLM2's program for one shape of batch: its time, what it reads and computes, and its floor.

    python -m benchmarks.kernels [--contexts 32] [--context-length 512] [--new-tokens 1] [--dtype bfloat16]
                                 [--threads 2] [--steps 20]

A batch has `--new-tokens` new tokens, the last ones, of each of `--contexts` contexts: 1 is a decode, more a prefill.
Times are those of one step, the median of `--steps` steps; the floor (`floor.py`) is that of ceilings measured here
right before (`ceilings.py`, which needs a C++ compiler).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from itertools import chain

import numpy as np

from batonq.engine.models import load_model, resolve_model
from batonq.kernels.batch import Batch
from batonq.kernels.cpu_backend import CpuBackend
from batonq.kernels.cpu_library import available_cores
from batonq.kernels.program import BLOCK_SIZE, Op, Program
from benchmarks.ceilings import measure_ceilings
from benchmarks.floor import Cost, cost, floor
from benchmarks.subjects import MODEL

_WARM_UP = 2


def make_batch(program: Program, contexts: int, context_length: int, new_tokens: int) -> Batch:
    """Each context with blocks of its own; logits of its last token."""
    blocks = -(-context_length // BLOCK_SIZE)
    ends = np.arange(1, contexts + 1) * new_tokens
    return Batch(
        token_ids=np.random.default_rng(0).integers(0, program.vocab_size, contexts * new_tokens, np.int32),
        positions=np.tile(np.arange(context_length - new_tokens, context_length, dtype=np.int32), contexts),
        query_start=np.concatenate([[0], ends]).astype(np.int32),
        context_len=np.full(contexts, context_length, np.int32),
        store_from=np.full(contexts, context_length - new_tokens, np.int32),
        block_tables=np.arange(contexts * blocks, dtype=np.int32).reshape(contexts, blocks),
        logits_rows=(ends - 1).astype(np.int32),
    )


def kind(op: Op, program: Program) -> str:
    """The op's class, and for a product the name of its matrix without its layer."""
    name = type(op).__name__
    weight = program.weights[op.weight] if hasattr(op, "weight") else None
    if weight is not None and len(weight.shape) == 2:
        name += " " + weight.name.removesuffix(".weight").rpartition(".")[2]
    return name


def seconds_by_kind(backend: CpuBackend, batch: Batch, steps: int) -> dict[str, float]:
    """The median over steps of the time that all ops of a kind take."""
    times = defaultdict[str, list[float]](list)
    backend.profile(on=True)
    for step in range(_WARM_UP + steps):
        backend.forward(batch)
        sums = defaultdict[str, float](float)
        for op, seconds in backend.profile(on=True):
            sums[kind(op, backend.program)] += seconds
        if step >= _WARM_UP:
            for name, seconds in sums.items():
                times[name].append(seconds)
    return {name: float(np.median(values)) for name, values in times.items()}


def costs_by_kind(backend: CpuBackend, batch: Batch) -> dict[str, list[Cost]]:
    costs = defaultdict[str, list[Cost]](list)
    for op, _ in backend.profile(on=False):
        costs[kind(op, backend.program)].append(cost(op, backend.program, batch))
    return costs


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, default=32)
    parser.add_argument("--context-length", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    if not 1 <= args.new_tokens <= args.context_length:
        parser.error("--new-tokens must be between 1 and --context-length")
    return args


def main() -> None:
    args = parse_arguments()
    model = load_model(resolve_model(MODEL), args.dtype)
    batch = make_batch(model.program, args.contexts, args.context_length, args.new_tokens)
    backend = CpuBackend(model.program, model.packed(), batch.block_tables.size, args.threads)
    for memory in backend.cache_bytes():
        memory.fill(0x3C)  # small numbers; pages that nobody wrote to would all be the same one, in a cache
    ceilings = measure_ceilings(backend.isa, args.threads)
    print(f"{MODEL}, {args.dtype}, {backend.isa}, {args.threads} threads: {ceilings}")
    print(f"{args.contexts} contexts of {args.context_length} tokens, {args.new_tokens} of them new\n")
    print(f"{'':36} {'ms':>9} {'GB/s':>7} {'GFLOP/s':>8} {'floor, ms':>10} {'% of it':>8}")
    seconds, costs = seconds_by_kind(backend, batch, args.steps), costs_by_kind(backend, batch)
    floors = {name: sum(floor(each, model.program, ceilings) for each in parts) for name, parts in costs.items()}

    def line(name: str, seconds: float, parts: list[Cost], least: float) -> None:
        read, operations = sum(part.bytes_read for part in parts), sum(part.operations for part in parts)
        print(f"{name:36} {seconds * 1e3:9.3f} {read / seconds / 1e9:7.1f} {operations / seconds / 1e9:8.1f}", end=" ")
        print(f"{least * 1e3:10.3f} {least / seconds:8.0%}")

    for name in sorted(seconds, key=lambda name: -seconds[name]):
        line(name, seconds[name], costs[name], floors[name])
    line("all", sum(seconds.values()), list(chain(*costs.values())), sum(floors.values()))


if __name__ == "__main__":
    main()
