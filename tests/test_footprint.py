"""What a worker takes of a machine once its model is cached: nothing that only training needs, no more than is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from batonq.engine.config import EngineConfig
from batonq.engine.loading import EngineOptions, load_engine
from batonq.engine.models import load_model, resolve_model
from batonq.engine.sampling_params import SamplingParams
from batonq.kernels.cpu_backend import CpuBackend
from batonq.kernels.cpu_library import library
from batonq.kernels.errors import BackendUnavailable
from batonq.producer import Producer, PromptJob
from batonq.producer.embedded import EmbeddedServer
from tests.support import tiny_models

MODEL = "smollm2-135m"
HEAVY = {"torch", "transformers", "safetensors", "huggingface_hub", "gguf", "accelerate", "jinja2"}

GENERATE = """
import sys
from batonq.engine import EngineConfig, SamplingParams, load_engine
from batonq.engine.loading import EngineOptions

config = EngineConfig(kv_cache_memory_bytes=1 << 24, num_threads=1)
engine, _ = load_engine(EngineOptions("smollm2-135m", dtype="bfloat16", config=config).to_dict())
params = [SamplingParams(temperature=0, max_tokens=4), SamplingParams(top_p=0.9, seed=1, max_tokens=4, logprobs=2)]
assert all(len(made.token_ids) == 4 for made in engine.generate(["The capital of France is"] * 2, params))
print(*sys.modules)
"""


@pytest.fixture(autouse=True, scope="module")
def compiled_library() -> None:
    try:
        library()
    except BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def weights_size() -> int:
    """Bytes of the packed weights, which are in the cache from here on."""
    return load_model(resolve_model(MODEL), "bfloat16").packed().nbytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("left_over", [0, 1, -1])
def test_the_pool_is_as_many_blocks_as_fit(dtype: tiny_models.DTypeName, left_over: int, tmp_path: Path) -> None:
    tiny_models.save("qwen3", tmp_path)
    tiny_models.save_tokenizer(tmp_path)
    per_block = 2 * 32 * 3 * 2 * 16 * (4 if dtype == "float32" else 2)
    memory = 7 * per_block + left_over
    config = EngineConfig(kv_cache_memory_bytes=memory, num_threads=1)
    engine, _ = load_engine(EngineOptions(str(tmp_path), dtype=dtype, config=config).to_dict())
    backend = engine.runner.backend  # type: ignore[attr-defined]
    assert isinstance(backend, CpuBackend)
    size = sum(part.nbytes for part in backend.cache_bytes())
    assert size == engine.pool.num_blocks * per_block
    assert size <= memory < size + per_block


def test_tokens_are_made_without_what_models_are_trained_with(weights_size: int) -> None:
    done = subprocess.run([sys.executable, "-c", GENERATE], capture_output=True, text=True, check=True, timeout=120)
    assert "batonq.kernels.cpu_backend" in done.stdout.split()
    assert HEAVY.isdisjoint(done.stdout.split())


def test_a_worker_takes_its_weights_its_pool_and_little_else(weights_size: int, valkey: EmbeddedServer) -> None:
    pool = 64 << 20
    settings = ["--model", MODEL, "--dtype", "bfloat16", "--kv-cache-memory", str(pool), "--num-threads", "1"]
    command = [sys.executable, "-m", "batonq.worker", "--redis-url", valkey.url, *settings]
    producer = Producer(valkey.url, queue=MODEL)
    with subprocess.Popen(command) as worker:
        try:
            asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            jobs = [PromptJob(token_ids=(*range(100, 110 + 20 * count),), sampling=asked) for count in range(8)]
            for job_id in producer.submit_many(jobs):
                assert producer.result(job_id, timeout=60).error is None
            processes = [psutil.Process(worker.pid), *psutil.Process(worker.pid).children()]
            assert len(processes) == 2
            mapped = {Path(file.path).name for process in processes for file in process.memory_maps()}
            assert "libbatonq_cpu.so" in mapped
            assert not {name for name in mapped if name.startswith(("libtorch", "libc10"))}
            used = sum(process.memory_full_info().pss for process in processes)
            # The weights are in it, or nothing of this would say much.
            assert weights_size < used <= weights_size + pool + 300_000_000
        finally:
            worker.terminate()
            producer.connection.close()
