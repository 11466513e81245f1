"""What the queue costs: the engine alone, a worker through Redis, and `batonq run` from first enqueue to last row.

    python -m benchmarks.run_overhead [WORKLOAD.jsonl] [--requests 16] [--rounds 3] [--dtype bfloat16]

A workload is a file as `workloads.py` reads it; without one, requests are made from Python's documentation. The three
run in turn, round after round, past EOS, so that each makes exactly `max_tokens` tokens. In a round all have the same
prompts, since these decide how often a guess is right; in each round they begin with another token, and each of the
three has an engine of its own, so that no prefix cache helps.
Loading, the start of processes and the first round are not counted. Ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from batonq.engine.loading import EngineOptions, load_engine
from benchmarks.subjects import MODEL, Subject, engine_alone, fleet
from benchmarks.workloads import Request, cold, mixed, read_workload


def measure(subjects: dict[str, Subject], requests: list[Request], rounds: int) -> dict[str, list[float]]:
    """Tokens per second of every subject in every round but the first, which is of a few requests and warms up."""
    rates: dict[str, list[float]] = {name: [] for name in subjects}
    for index in range(rounds + 1):
        part = cold(requests if index else requests[:4])
        for name, run in subjects.items():
            rate = sum(r.max_tokens for r in part) / run(part)
            if index:
                rates[name].append(rate)
                print(f"round {index}  {name:22} {rate:8.1f} output tokens/s", flush=True)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", type=Path)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    args = parser.parse_args()
    engine, _ = load_engine(EngineOptions(MODEL, dtype=args.dtype).to_dict())
    if args.workload is None:
        requests = mixed(engine.encoder.encode, args.requests, 0)
    else:
        requests = read_workload(args.workload, args.requests)
    with fleet("--dtype", args.dtype) as first, fleet("--dtype", args.dtype) as second:
        subjects = {
            "engine alone": engine_alone(engine),
            "worker through Redis": first.through_redis,
            "batonq run": second.run_over_a_file,
        }
        before = first.cpu_seconds() + second.cpu_seconds()
        rates = measure(subjects, requests, args.rounds)
        used = first.cpu_seconds() + second.cpu_seconds() - before
    made = sum(r.max_tokens for r in requests) * args.rounds * 2
    print(f"\n{MODEL}, {args.dtype}, {len(requests)} requests, {args.rounds} rounds")
    for name, values in rates.items():
        ratio = statistics.median(a / b for a, b in zip(values, rates["engine alone"], strict=True))
        print(f"{name:22} {statistics.median(values):8.1f} output tokens/s   {ratio:.3f} of the engine alone")
    print(f"a worker's parent used {used / made * 1e6:.0f} µs of processor time per output token")


if __name__ == "__main__":
    main()
