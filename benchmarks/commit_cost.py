"""What mirror, commits and heartbeats cost: a worker that commits every 50 ms beside one that hardly does, in turn.

    python -m benchmarks.commit_cost [WORKLOAD.jsonl] [--requests 64] [--rounds 4] [--dtype bfloat16]

Speed is that between the first and the last sample of a round, as each engine notes them itself, so that what a round
waits for at its end doesn't count. The processor time of the committing worker's parent and of the server is printed
too, as a share of what the machine has.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from batonq.engine.loading import EngineOptions, load_engine
from batonq.worker import step_log
from benchmarks.subjects import MODEL, Fleet, fleet
from benchmarks.workloads import Request, cold, mixed, read_workload

#: Seconds between commits of the one that hardly commits.
SELDOM = 5.0


def tokens_per_second(running: Fleet, requests: list[Request], directory: Path) -> float:
    """Of the engine itself, over one round."""
    begin = time.monotonic()
    running.through_redis(cold(requests))
    drawn = sorted(s.at for path in directory.iterdir() for s in step_log.read(path) if s.at > begin)
    return (len(drawn) - 1) / (drawn[-1] - drawn[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", type=Path)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    args = parser.parse_args()
    if args.workload is None:
        engine, _ = load_engine(EngineOptions(MODEL, dtype=args.dtype).to_dict())
        requests = mixed(engine.encoder.encode, args.requests, 0)
        del engine
    else:
        requests = read_workload(args.workload, args.requests)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        os.environ[step_log.VARIABLE] = name
        often, seldom = ("--dtype", args.dtype), ("--dtype", args.dtype, "--commit-interval", str(SELDOM))
        with fleet(*often) as committing, fleet(*seldom) as hardly:
            rates: list[tuple[float, float]] = []
            used, passed = 0.0, 0.0
            for index in range(args.rounds + 1):
                part = requests if index else requests[:4]
                before, begin = committing.cpu_seconds() + committing.server_cpu_seconds(), time.monotonic()
                rate = tokens_per_second(committing, part, Path(name))
                after, end = committing.cpu_seconds() + committing.server_cpu_seconds(), time.monotonic()
                other = tokens_per_second(hardly, part, Path(name))
                if index:
                    rates.append((rate, other))
                    used, passed = used + after - before, passed + end - begin
                    print(f"round {index}  {rate:8.1f} committing, {other:8.1f} hardly, tokens/s", flush=True)
    ratio = statistics.median(rate / other for rate, other in rates)
    share = used / passed / len(os.sched_getaffinity(0))
    print(f"committing is {ratio:.3f} x hardly committing; parent and server used {share:.2%} of the processors")


if __name__ == "__main__":
    main()
