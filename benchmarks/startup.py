"""From the start of `python -m batonq.worker` until it is registered, with a cached model, in seconds.

    python -m benchmarks.startup [--rounds 5] [--dtype bfloat16]

In turn with a process that does nothing but import redis and rq, which no worker can do without; the medians and their
ratio are printed. The first round, which may convert and pack the model, is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from benchmarks.subjects import fleet


def seconds_to_ready(dtype: str) -> float:
    with fleet("--dtype", dtype) as running:
        return running.seconds_to_ready


def seconds_to_import() -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import redis, rq"], check=True)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    rounds = [(seconds_to_ready(args.dtype), seconds_to_import()) for _ in range(args.rounds + 1)][1:]
    ready, imported = (statistics.median(times) for times in zip(*rounds, strict=True))
    print(f"ready after {ready:.2f} s (from {min(rounds)[0]:.2f} to {max(rounds)[0]:.2f} in {args.rounds} rounds)")
    print(f"{ready / imported:.1f} x a process that imports redis and rq ({imported:.2f} s)")


if __name__ == "__main__":
    main()
