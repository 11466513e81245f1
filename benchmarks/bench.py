"""Output tokens per second: the engine alone, the same through Redis and a worker, and transformers' padded batches.

    python -m benchmarks.bench [--requests 48] [--rounds 3]

All three run in turn, round after round, on the same requests of each round; medians and ratios are printed. Model
loading and a warm-up are not counted; the prefix cache is cold in every round, since every round has other prompts.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from batonq.engine.config import EngineConfig
from batonq.engine.engine import Engine
from batonq.engine.loading import EngineOptions, load_engine
from batonq.engine.sampling_params import SamplingParams
from batonq.producer import Producer, PromptJob, keys
from batonq.producer.embedded import EmbeddedServer
from benchmarks.workloads import Request, mixed

MODEL = "smollm2-135m"
BATCH = 64

Subject = Callable[[list[Request]], None]


def greedy(request: Request) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)


def engine_alone(engine: Engine) -> Subject:  # type: ignore[type-arg]
    def run(requests: list[Request]) -> None:
        engine.generate([r.prompt_ids for r in requests], [greedy(r) for r in requests])

    return run


@contextmanager
def through_redis() -> Iterator[Subject]:
    """A server and a worker process; a run ends when the last result has been read."""
    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedServer(Path(directory))
        command = [sys.executable, "-m", "batonq.worker", "--redis-url", server.url, "--model", MODEL]
        worker = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        producer = Producer(server.url)
        try:
            while not producer.connection.scard(keys.workers_of_queue(MODEL)):
                if worker.poll() is not None:
                    raise SystemExit("the worker ended before it was ready")
                time.sleep(0.05)

            def run(requests: list[Request]) -> None:
                jobs = [PromptJob(model=MODEL, token_ids=r.prompt_ids, sampling=greedy(r)) for r in requests]
                for job_id, request in zip(producer.submit_many(jobs), requests, strict=True):
                    result = producer.result(job_id)
                    assert result.usage is not None, result.error
                    assert result.usage.completion_tokens == request.max_tokens

            yield run
        finally:
            worker.terminate()
            worker.wait()
            producer.connection.close()
            server.stop()


def transformers_padded(directory: Path) -> Subject:
    """Batches of 64, sorted by output length, padded on the left: `generate` as it is used offline."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def run(requests: list[Request]) -> None:
        ordered = sorted(requests, key=lambda r: r.max_tokens)
        for start in range(0, len(ordered), BATCH):
            part = ordered[start : start + BATCH]
            width, new = max(len(r.prompt_ids) for r in part), max(r.max_tokens for r in part)
            ids = torch.tensor([[2] * (width - len(r.prompt_ids)) + r.prompt_ids for r in part])
            mask = torch.tensor([[0] * (width - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in part])
            model.generate(
                ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=2
            )

    return run


def measure(subjects: dict[str, Subject], rounds: list[list[Request]]) -> dict[str, list[float]]:
    """Tokens per second of every subject in every round; the first round warms up and is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in subjects}
    for index, requests in enumerate(rounds):
        for name, run in subjects.items():
            begin = time.perf_counter()
            run(requests)
            rate = sum(r.max_tokens for r in requests) / (time.perf_counter() - begin)
            if index:
                rates[name].append(rate)
                print(f"round {index}  {name:22} {rate:8.1f} output tokens/s", flush=True)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with ExitStack() as stack:
        engine, directory = load_engine(EngineOptions(MODEL, config=EngineConfig()).to_dict())
        subjects = {
            "engine alone": engine_alone(engine),
            "through Redis": stack.enter_context(through_redis()),
            "transformers, padded": transformers_padded(directory),
        }
        rounds = [mixed(engine.encoder.encode, 8, 0)]
        rounds += [mixed(engine.encoder.encode, args.requests, seed) for seed in range(1, args.rounds + 1)]
        rates = measure(subjects, rounds)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"\n{MODEL}, float32, {args.requests} requests, median of {args.rounds} rounds")
    for name, median in medians.items():
        print(
            f"{name:22} {median:8.1f} output tokens/s   {median / medians['transformers, padded']:5.2f} x transformers"
        )
    print(f"through Redis / engine alone: {medians['through Redis'] / medians['engine alone']:.3f}")


if __name__ == "__main__":
    main()
