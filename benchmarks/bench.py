"""Output tokens per second: the engine alone, the same through Redis and a worker, and transformers' padded batches.

    python -m benchmarks.bench [--requests 24] [--rounds 3] [--dtype bfloat16]

All three run in turn, round after round, on the same requests of each round; medians and ratios are printed. Model
loading and a warm-up are not counted; the prefix cache is cold in every round, since every round has other prompts.
"""

from __future__ import annotations

import argparse
import statistics

from batonq.engine.loading import EngineOptions, load_engine
from benchmarks.subjects import MODEL, Subject, engine_alone, fleet, transformers_padded
from benchmarks.workloads import Request, mixed


def measure(subjects: dict[str, Subject], rounds: list[list[Request]]) -> dict[str, list[float]]:
    """Tokens per second of every subject in every round; the first round warms up and is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in subjects}
    for index, requests in enumerate(rounds):
        for name, run in subjects.items():
            rate = sum(r.max_tokens for r in requests) / run(requests)
            if index:
                rates[name].append(rate)
                print(f"round {index}  {name:22} {rate:8.1f} output tokens/s", flush=True)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    args = parser.parse_args()
    engine, directory = load_engine(EngineOptions(MODEL, dtype=args.dtype).to_dict())
    with fleet("--dtype", args.dtype) as running:
        subjects = {
            "engine alone": engine_alone(engine),
            "through Redis": running.through_redis,
            "transformers, padded": transformers_padded(directory, args.dtype),
        }
        rounds = [mixed(engine.encoder.encode, 8, 0)]
        rounds += [mixed(engine.encoder.encode, args.requests, seed) for seed in range(1, args.rounds + 1)]
        rates = measure(subjects, rounds)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"\n{MODEL}, {args.dtype}, {args.requests} requests, median of {args.rounds} rounds")
    for name, median in medians.items():
        print(
            f"{name:22} {median:8.1f} output tokens/s   {median / medians['transformers, padded']:5.2f} x transformers"
        )
    print(f"through Redis / engine alone: {medians['through Redis'] / medians['engine alone']:.3f}")


if __name__ == "__main__":
    main()
