"""Bitwise exactness of the compiled backend: a context's logits and tokens are functions of its own tokens alone.

Expected bits come from sequences that are computed at once, alone and on one thread. The suite runs samples of it, and
`make soak` the whole matrix of instruction sets, dtypes, threads and crowds.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from batonq.engine.config import EngineConfig
from batonq.engine.engine import Engine
from batonq.engine.loading import EngineOptions, load_engine
from batonq.engine.models import LoadedModel, ModelSource, load_model, resolve_model
from batonq.engine.sampling_params import SamplingParams
from batonq.kernels.cpu_backend import CpuBackend
from batonq.kernels.cpu_library import ISA_VARIABLE
from batonq.kernels.logits import Logits
from batonq.kernels.packed import PackedWeights
from tests.support import tiny_models
from tests.support.bits import SameBits, alone, differences, together
from tests.support.isas import ISAS, skip_without
from tests.support.tiny_models import DTypeName

SMOLLM2 = "smollm2-135m"
DTYPES: tuple[DTypeName, ...] = ("float32", "bfloat16")
#: Of which models the bits are compared; windows and lengths reach over the kernels' chunk of 256 keys.
VARIANTS = ("long", "long-windows", "gqa3-untied", "qwen3-biases")

TinyEngine = Engine[Logits]


class Case(NamedTuple):
    """What runs how. `crowd` contexts run at once."""

    model: str
    isa: str
    dtype: DTypeName
    crowd: int
    threads: int


def cases(sampled: list[Case], whole: list[Case]) -> pytest.MarkDecorator:
    """Parametrizes by `case`: the sampled ones, and the rest of the whole matrix in the soak."""
    rest = [case for case in whole if case not in sampled]
    params = [*sampled, *(pytest.param(case, marks=pytest.mark.soak) for case in rest)]
    return pytest.mark.parametrize("case", params, ids=lambda case: "-".join(map(str, case)))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {variant: tmp_path_factory.mktemp(variant) for variant in VARIANTS}
    for variant, directory in made.items():
        tiny_models.save(variant, directory)
        tiny_models.save_tokenizer(directory)
    return made


@cache
def loaded(source: ModelSource, dtype: DTypeName) -> tuple[LoadedModel, PackedWeights]:
    model = load_model(source, dtype)
    return model, model.packed()


def backend(source: ModelSource, case: Case, num_blocks: int, threads: int) -> CpuBackend:
    model, weights = loaded(source, case.dtype)
    return CpuBackend(model.program, weights, num_blocks, threads, case.isa)


def differences_in_a_crowd(
    source: ModelSource, case: Case, lengths: list[int], vocabulary: int, most_tokens: int
) -> list[tuple[int, int]]:
    """Runs sequences of these lengths alone and together; where the bits of their logits differ."""
    skip_without(case.isa)
    chance = random.Random(str(case))
    sequences = [chance.choices(range(3, vocabulary), k=length) for length in lengths]
    num_blocks = sum(-(-length // 32) for length in lengths) + 3
    single = backend(source, case, -(-max(lengths) // 32), 1)
    expected = [alone(single, tokens) for tokens in sequences]
    crowd = backend(source, case, num_blocks, case.threads)
    return differences(together(crowd, sequences, chance, num_blocks, most_tokens), expected)


def tiny_whole() -> list[Case]:
    """All of instruction sets, dtypes, crowds and threads; the models in turn."""
    matrix = product(ISAS, DTYPES, (2, 7, 33, 64, 128), (1, 2, 3, 4))
    return [Case(VARIANTS[i % len(VARIANTS)], *rest) for i, rest in enumerate(matrix)]


@cases(
    [
        Case("long", "avx512bf16", "bfloat16", 128, 3),
        Case("long-windows", "avx512bf16", "float32", 33, 2),
        Case("long-windows", "avx512", "bfloat16", 17, 4),
        Case("long", "avx512", "float32", 7, 3),
        Case("long-windows", "avx2", "bfloat16", 9, 2),
        Case("long", "avx2", "float32", 64, 4),
        Case("gqa3-untied", "avx512bf16", "bfloat16", 2, 4),
        Case("qwen3-biases", "avx2", "bfloat16", 3, 1),
    ],
    tiny_whole(),
)
def test_tiny_models_in_a_crowd(directories: dict[str, Path], case: Case) -> None:
    chance = random.Random(f"lengths of {case}")
    longest = 600 if case.model.startswith("long") else 250
    # A few that are long, as the most that there is of anything is a matter of one context.
    lengths = [chance.randint(1, longest if i < 3 else 90) for i in range(case.crowd)]
    source = ModelSource("tiny", directories[case.model])
    assert differences_in_a_crowd(source, case, lengths, 131, 1000) == []


@cases(
    [Case(SMOLLM2, "avx512bf16", "bfloat16", 6, 3)],
    [
        Case(SMOLLM2, isa, dtype, crowd, threads)
        for isa, dtype in product(ISAS, DTYPES)
        for crowd, threads in ((2, 4), (40, 3), (128, 2))
    ],
)
def test_smollm2_in_a_crowd(case: Case) -> None:
    """At most 300 tokens a step, whose logits take 60 MB."""
    chance = random.Random(f"lengths of {case}")
    lengths = [290 if case.crowd < 100 else 60, *(chance.randint(1, 60) for _ in range(case.crowd - 1))]
    assert differences_in_a_crowd(resolve_model(SMOLLM2), case, lengths, 49_152, 300) == []


def run(engine: TinyEngine, prompts: list[list[int]], new_tokens: int, preempt: float) -> list[list[int]]:
    """Outputs of prompts run together, of which each is preempted with this probability before a step.

    Half the time its blocks are lost, too, and it is computed again from its tokens.
    """
    chance = random.Random(len(prompts))
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=index % 2, seed=index, max_tokens=new_tokens, ignore_eos=True)
        engine.add(str(index), prompt, params)
    while engine.has_work:
        for context in tuple(engine.scheduler.running):
            if chance.random() < preempt and context.num_preemptions < 3:
                engine.preempt(context.context_id)
                if chance.random() < 0.5:
                    engine.pool.release(engine.pool.allocate(engine.pool.num_available))
        engine.step()
        engine.scheduler.check()
    outputs = [engine.forget(str(index)).token_ids for index in range(len(prompts))]
    engine.check_idle()
    return outputs


def prompts_with_shared_beginnings(count: int, longest: int, vocabulary: int) -> list[list[int]]:
    chance = random.Random(count)
    prompts: list[list[int]] = []
    for index in range(count):
        shared = prompts[-1][: chance.choice((31, 32, 33, 64, 70))] if index % 3 else []
        new = chance.choices(range(3, vocabulary), k=chance.randint(1, longest))
        prompts.append([*shared, *new][: longest + 40])
    return prompts


def engine_for(
    model: str, case: Case, directories: dict[str, Path], seen: dict[tuple[str | int, ...], bytes]
) -> TinyEngine:
    """An engine whose logits are held to what was `seen`. A crowd of one has no guesses: token by token."""
    crowd = {"max_num_seqs": case.crowd, "num_threads": case.threads}
    if case.crowd == 1:
        crowd["num_speculative_tokens"] = 0
    if model == SMOLLM2:
        config = EngineConfig(kv_cache_memory_bytes=1 << 28, max_num_batched_tokens=170, **crowd)
        engine, _ = load_engine(EngineOptions(model, dtype=case.dtype, config=config).to_dict())
    else:
        crowd["max_num_batched_tokens"] = 67 + case.crowd
        engine = tiny_models.engine(directories[model], 400, case.dtype, **crowd)
    engine.runner = SameBits(engine.runner, seen)
    return engine


def check_engine(case: Case, directories: dict[str, Path], sizes: tuple[int, int, int, int]) -> None:
    """`sizes`: prompts, their longest, new tokens, and the vocabulary."""
    skip_without(case.isa)
    count, longest, new_tokens, vocabulary = sizes
    seen: dict[tuple[str | int, ...], bytes] = {}
    prompts = prompts_with_shared_beginnings(count, longest, vocabulary)
    single = engine_for(case.model, case._replace(crowd=1, threads=1), directories, seen)
    expected = run(single, prompts, new_tokens, 0.0)
    crowd = engine_for(case.model, case, directories, seen)
    for preempt in (0.0, 0.15):  # cold, then warm and disturbed
        assert run(crowd, prompts, new_tokens, preempt) == expected
    assert isinstance(crowd.runner, SameBits)
    assert crowd.runner.compared >= 2 * count * new_tokens
    # Prefill of what was generated: the logits at each of its positions are those that its decode gave.
    before = crowd.runner.compared
    for index, (prompt, output) in enumerate(zip(prompts, expected, strict=True)):
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        crowd.add(str(index), [*prompt, *output], params)
    while crowd.has_work:
        crowd.step()
    assert crowd.runner.compared >= before + count * new_tokens


@cases(
    [
        Case("long", "avx512bf16", "bfloat16", 32, 3),
        Case("long-windows", "avx512", "bfloat16", 8, 2),
        Case("long-windows", "avx2", "float32", 5, 4),
    ],
    [case for case in tiny_whole() if case.threads > 1],
)
def test_tiny_models_through_the_engine(
    directories: dict[str, Path], case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cold, with a warm prefix cache, preempted with and without their blocks, and recomputed by prefill."""
    monkeypatch.setenv(ISA_VARIABLE, case.isa)
    longest = 300 if case.model.startswith("long") else 120
    check_engine(case, directories, (min(24, 2 * case.crowd), longest, 30, 131))


@cases(
    [Case(SMOLLM2, "avx512bf16", "bfloat16", 6, 2)],
    [Case(SMOLLM2, isa, dtype, 16, 3) for isa, dtype in product(ISAS, DTYPES)],
)
def test_smollm2_through_the_engine(directories: dict[str, Path], case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, case.isa)
    check_engine(case, directories, (case.crowd, 70, 16, 49_152))
