"""One subject of `peers.py` in a process of its own, with the interpreter of its environment.

Its only argument is a JSON object: `subject`, `dtype`, `threads`, `models` (the directory of the peers' models), and
for ours `max_num_seqs`, `max_num_batched_tokens` and `num_speculative_tokens`. It says `{"ready": true}` once it is
loaded. Then each line that comes in is the path of a workload (`workloads.py`), run with a cold prefix cache; the
answer is a line with `tokens`, those that were made, and `seconds`. It ends with its input.

Nothing but the standard library is imported before the subject is known, since a peer's environment has none of ours.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

Options = dict[str, Any]
Rows = list[dict[str, Any]]

#: Rows of a padded batch of transformers.
_BATCH = 64


class Loaded(NamedTuple):
    #: Runs the rows and returns how many tokens were made.
    run: Callable[[Rows], int]
    #: Makes the prefix cache forget all.
    reset: Callable[[], object]


def _nothing_to_reset() -> None:
    pass


@contextmanager
def batonq(options: Options) -> Iterator[Loaded]:
    from batonq.engine.config import EngineConfig  # noqa: PLC0415
    from batonq.engine.loading import EngineOptions, load_engine  # noqa: PLC0415
    from benchmarks.subjects import MODEL, sampling  # noqa: PLC0415
    from benchmarks.workloads import from_row  # noqa: PLC0415

    config = EngineConfig(
        options["max_num_seqs"],
        options["max_num_batched_tokens"],
        num_speculative_tokens=options["num_speculative_tokens"],
        num_threads=options["threads"],
    )
    engine, _ = load_engine(EngineOptions(MODEL, dtype=options["dtype"], config=config).to_dict())

    def run(rows: Rows) -> int:
        requests = [from_row(row) for row in rows]
        done = engine.generate([r.prompt_ids for r in requests], [sampling(r) for r in requests])
        return sum(len(output.token_ids) for output in done)

    yield Loaded(run, engine.reset_prefix_cache)


@contextmanager
def batonq_redis(options: Options) -> Iterator[Loaded]:
    from benchmarks.subjects import fleet  # noqa: PLC0415
    from benchmarks.workloads import cold, from_row  # noqa: PLC0415

    same = ("dtype", "max_num_seqs", "max_num_batched_tokens", "num_speculative_tokens")
    names = {key: key.replace("_", "-") for key in same} | {"threads": "num-threads"}
    with fleet(*(f"--{name}={options[key]}" for key, name in names.items())) as running:

        def run(rows: Rows) -> int:
            requests = [from_row(row) for row in rows]
            running.through_redis(cold(requests))  # which checks that each made its tokens
            return sum(request.max_tokens for request in requests)

        yield Loaded(run, _nothing_to_reset)


@contextmanager
def vllm(options: Options) -> Iterator[Loaded]:
    threads = options["threads"]
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": str(threads),
    }
    from vllm import LLM, SamplingParams  # noqa: PLC0415

    engine = LLM(
        model=f"{options['models']}/smollm2-135m-bf16",
        dtype=options["dtype"],
        max_model_len=8192,
        max_num_seqs=256,
        seed=0,
        disable_log_stats=True,
    )
    names = ("temperature", "top_p", "max_tokens", "ignore_eos")

    def run(rows: Rows) -> int:
        params = [SamplingParams(**{name: row[name] for name in names}) for row in rows]
        prompts = [{"prompt_token_ids": row["prompt_ids"]} for row in rows]
        return sum(len(done.outputs[0].token_ids) for done in engine.generate(prompts, params, use_tqdm=False))

    yield Loaded(run, engine.reset_prefix_cache)


@contextmanager
def openvino(options: Options) -> Iterator[Loaded]:
    import numpy as np  # noqa: PLC0415
    import openvino_genai as genai  # noqa: PLC0415
    from openvino import Tensor  # noqa: PLC0415

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 4, 128, 1024
    # Its cache of prefixes can't be emptied, so it would not be cold.
    scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, False
    properties = {
        "INFERENCE_NUM_THREADS": options["threads"],
        "INFERENCE_PRECISION_HINT": {"bfloat16": "bf16", "float32": "f32"}[options["dtype"]],
        "PERFORMANCE_HINT": "LATENCY",
    }
    model = "ov-int8" if options["subject"] == "openvino-int8" else "ov-fp32"
    pipeline = genai.ContinuousBatchingPipeline(f"{options['models']}/{model}", scheduler, "CPU", properties)

    def config(row: dict[str, Any]) -> Any:
        wanted = genai.GenerationConfig()
        wanted.max_new_tokens, wanted.ignore_eos = row["max_tokens"], row["ignore_eos"]
        if row["temperature"] > 0:
            wanted.do_sample, wanted.rng_seed = True, row["id"]
            wanted.temperature, wanted.top_p = row["temperature"], row["top_p"]
        return wanted

    def run(rows: Rows) -> int:
        prompts = [Tensor(np.array([row["prompt_ids"]], np.int64)) for row in rows]
        return sum(len(done.m_generation_ids[0]) for done in pipeline.generate(prompts, [config(row) for row in rows]))

    yield Loaded(run, _nothing_to_reset)


def padded_batches(model: Any) -> Callable[[Rows], int]:
    """A transformers model's `generate` as it is used offline: batches by output length, padded on the left."""
    import torch  # noqa: PLC0415

    def batch(rows: Rows) -> None:
        width, new = max(len(row["prompt_ids"]) for row in rows), max(row["max_tokens"] for row in rows)
        padding = [width - len(row["prompt_ids"]) for row in rows]
        ids = torch.tensor([[2] * pad + row["prompt_ids"] for pad, row in zip(padding, rows, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])
        how: dict[str, Any] = {"do_sample": False}
        if rows[0]["temperature"] > 0:
            how = {"do_sample": True, "temperature": rows[0]["temperature"], "top_p": rows[0]["top_p"], "top_k": 0}
        model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, pad_token_id=2, **how)

    def run(rows: Rows) -> int:
        ordered = sorted(rows, key=lambda row: row["max_tokens"])
        with torch.inference_mode():
            for start in range(0, len(ordered), _BATCH):
                batch(ordered[start : start + _BATCH])
        return sum(row["max_tokens"] for row in rows)  # what a padded row makes beyond that is thrown away

    return run


@contextmanager
def transformers(options: Options) -> Iterator[Loaded]:
    os.environ["OMP_NUM_THREADS"] = str(options["threads"])
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    torch.set_num_threads(options["threads"])
    suffix = {"bfloat16": "bf16", "float32": "fp32"}[options["dtype"]]
    model = AutoModelForCausalLM.from_pretrained(f"{options['models']}/smollm2-135m-{suffix}", dtype="auto").eval()

    yield Loaded(padded_batches(model), _nothing_to_reset)


SUBJECTS = {
    "batonq": batonq,
    "batonq-redis": batonq_redis,
    "vllm": vllm,
    "openvino": openvino,
    "openvino-int8": openvino,
    "transformers": transformers,
}


def main() -> None:
    # Libraries print; what they print goes where errors go, and answers to where the output was.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    options = json.loads(sys.argv[1])
    with SUBJECTS[options["subject"]](options) as loaded:
        print('{"ready": true}', file=answers)
        for line in sys.stdin:
            rows = [json.loads(row) for row in Path(line.strip()).read_text(encoding="utf-8").splitlines()]
            loaded.reset()
            begin = time.perf_counter()
            tokens = loaded.run(rows)
            seconds = time.perf_counter() - begin
            print(json.dumps({"tokens": tokens, "seconds": seconds}), file=answers)


if __name__ == "__main__":
    main()
