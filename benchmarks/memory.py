"""Peak memory of a worker, its parent and its engine together, while it runs requests.

    python -m benchmarks.memory [WORKLOAD.jsonl] [--requests 48] [--dtype bfloat16] [--kv-cache-memory 256MiB]

Counted is the proportional set size, in which a page that several processes map is shared out among them, twenty times
a second. What the weights and the KV pool come to is printed beside it; the pool counts as far as it has been written.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from batonq.engine.loading import Frontend
from batonq.engine.models import load_model, resolve_model
from batonq.worker.cli import parse_memory
from benchmarks.subjects import MODEL, fleet
from benchmarks.workloads import mixed, read_workload

_INTERVAL = 0.05


def proportional_set_size(pid: int) -> int:
    """Bytes of a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    own = next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return own + sum(proportional_set_size(int(child)) for child in children)


@contextmanager
def watched(pid: int) -> Iterator[list[int]]:
    """A list with the peak so far."""
    peak, ended = [0], Event()

    def watch() -> None:
        while not ended.wait(_INTERVAL):
            peak[0] = max(peak[0], proportional_set_size(pid))

    thread = Thread(target=watch)
    thread.start()
    yield peak
    ended.set()
    thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", type=Path)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--kv-cache-memory", default="256MiB")
    args = parser.parse_args()
    model = load_model(resolve_model(MODEL), args.dtype)
    weights = model.packed().nbytes
    if args.workload is None:
        requests = mixed(Frontend(model.directory).encode, args.requests, 0)
    else:
        requests = read_workload(args.workload, args.requests)
    pool = parse_memory(args.kv_cache_memory)
    pool -= pool % model.program.kv_cache.bytes_per_block
    with fleet("--dtype", args.dtype, "--kv-cache-memory", args.kv_cache_memory) as running:
        idle = proportional_set_size(running.worker.pid)
        with watched(running.worker.pid) as peak:
            running.through_redis(requests)
    rest = peak[0] - weights - pool
    for what, size in {"idle": idle, "peak": peak[0], "weights": weights, "KV pool": pool, "rest": rest}.items():
        print(f"{what:8} {size / 1e6:8.1f} MB")


if __name__ == "__main__":
    main()
