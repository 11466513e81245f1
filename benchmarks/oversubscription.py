"""What a decode step loses where threads outnumber cores: steps of SmolLM2 with a thread a core and with two, in turn.

    python -m benchmarks.oversubscription [--contexts 1 32] [--context-length 128] [--dtype bfloat16] [--threads 2]
                                          [--rounds 5]

Both run in one process on the same weights, round after round; a ratio is that of the medians of their steps a second.
"""

from __future__ import annotations

import argparse
import statistics
import time

from batonq.engine.models import load_model, resolve_model
from batonq.kernels.batch import Batch
from batonq.kernels.cpu_backend import CpuBackend
from batonq.kernels.cpu_library import available_cores
from batonq.kernels.program import BLOCK_SIZE
from benchmarks.kernels import make_batch
from benchmarks.subjects import MODEL

#: Seconds that each runs in a round.
_ROUND = 1.0


def steps_per_second(backend: CpuBackend, batch: Batch) -> float:
    backend.forward(batch)  # wakes the team
    begin = time.perf_counter()
    steps = 0
    while (spent := time.perf_counter() - begin) < _ROUND:
        backend.forward(batch)
        steps += 1
    return steps / spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--context-length", type=int, default=128)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=available_cores(), help="the smaller number of the two")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model = load_model(resolve_model(MODEL), args.dtype)
    weights = model.packed()
    num_blocks = max(args.contexts) * -(-args.context_length // BLOCK_SIZE)
    sizes = (args.threads, 2 * args.threads)
    backends = [CpuBackend(model.program, weights, num_blocks, size) for size in sizes]
    for contexts in args.contexts:
        batch = make_batch(model.program, contexts, args.context_length, 1)
        rates: list[list[float]] = [[], []]
        for _ in range(args.rounds):
            for backend, rate in zip(backends, rates, strict=True):
                rate.append(steps_per_second(backend, batch))
        medians = [statistics.median(rate) for rate in rates]
        shown = "   ".join(f"{size} threads {rate:7.1f} steps/s" for size, rate in zip(sizes, medians, strict=True))
        print(f"{contexts:4} contexts of {args.context_length}   {shown}   ratio {medians[1] / medians[0]:.2f}")


if __name__ == "__main__":
    main()
