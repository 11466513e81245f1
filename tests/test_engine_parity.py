"""SmolLM2 through the whole engine against transformers, greedy, token for token."""

from __future__ import annotations

import random
from typing import Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from batonq.engine.config import EngineConfig
from batonq.engine.engine import Engine
from batonq.engine.loading import EngineOptions, load_engine
from batonq.engine.sampling_params import SamplingParams
from batonq.kernels.cpu_library import best_isa
from batonq.kernels.logits import Logits
from batonq.kernels.program import BLOCK_SIZE
from tests.support.greedy import assert_greedy
from tests.support.models import smollm2_dir
from tests.support.prompts import passages

SmolEngine = Engine[Logits]

NEW_TOKENS = 64
#: Keys and values of 32 tokens in 30 layers of 3 heads of 64, in float32.
SMOLLM2_BYTES_PER_BLOCK = 2 * 32 * 30 * 3 * 64 * 4
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)


def build(dtype: Literal["float32", "bfloat16"] = "float32", **config: int) -> SmolEngine:
    settings = EngineConfig(num_threads=1, **config)
    return load_engine(EngineOptions("smollm2-135m", dtype=dtype, config=settings).to_dict())[0]


@pytest.fixture(scope="module")
def engine() -> SmolEngine:
    engine = build(max_num_batched_tokens=256, kv_cache_memory_bytes=1 << 29)
    assert engine.spec.numerics_id.startswith(f"float32-{best_isa()}-"), "this proves nothing of the compiled backend"
    return engine


@pytest.fixture(scope="module")
def prompts(engine: SmolEngine) -> list[list[int]]:
    """Twenty prompts of 3 to 45 tokens, four of them conversations."""
    texts = passages(16)
    plain = [engine.encoder.encode(text)[: 3 + 2 * i] for i, text in enumerate(texts)]
    chats = [
        engine.encoder.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        for question in ("What is the capital of France?", "Name three colours.", "Why is the sky blue?", "Say hello.")
    ]
    return plain + chats


@pytest.fixture(scope="module")
def outputs(engine: SmolEngine, prompts: list[list[int]]) -> list[list[int]]:
    """What the engine makes of each prompt alone."""
    made = []
    for prompt in prompts:
        (generation,) = engine.generate([prompt], GREEDY)
        engine.check_idle()
        made.append(generation.token_ids)
    return made


def test_greedy_alone(engine: SmolEngine, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(smollm2_dir(), dtype=torch.float32)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(oracle, prompt, output)
        assert len(output) == NEW_TOKENS or output[-1] in engine.spec.eos_token_ids
        assert not engine.spec.eos_token_ids & set(output[:-1])
    ids = torch.tensor([prompts[3]])
    made = oracle.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=2)
    assert made[0, ids.shape[1] :].tolist() == outputs[3]


def test_greedy_in_a_crowd_that_joins_and_leaves(
    engine: SmolEngine, prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    """64 contexts: the twenty prompts among strangers of other lengths, some aborted, added a few at each step."""
    chance = random.Random(5)
    strangers = [engine.encoder.encode(text) for text in passages(44, 120)]
    arrivals = [(f"wanted-{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
    for i, stranger in enumerate(strangers):
        params = SamplingParams(temperature=chance.choice([0, 1]), seed=i, max_tokens=chance.randint(1, 24))
        arrivals.append((f"stranger-{i}", stranger[: chance.randint(1, len(stranger))], params))
    chance.shuffle(arrivals)
    together = 0
    made: dict[str, list[int]] = {}
    while arrivals or engine.has_work:
        for _ in range(min(len(arrivals), 8)):
            engine.add(*arrivals.pop())
        for part in engine.step().outputs:
            if part.finish_reason is not None:
                made[part.context_id] = engine.forget(part.context_id).token_ids
        together = max(together, len(engine.scheduler.running))
        engine.scheduler.check()
        if chance.random() < 0.1:
            for name in [name for name in engine.contexts if name.startswith("stranger")][:1]:
                engine.abort(name)
                engine.forget(name)
    engine.check_idle()
    assert together > 32, "there was no crowd"
    assert [made[f"wanted-{i}"] for i in range(len(prompts))] == outputs


def test_chunked_preempted_cold_and_warm(prompts: list[list[int]], outputs: list[list[int]]) -> None:
    """Four tokens a step; each is preempted at the border of a block or, if it meets none, after five tokens."""
    chosen, length = range(13, 17), 8
    engine = build(max_num_seqs=4, max_num_batched_tokens=4, kv_cache_memory_bytes=1 << 26)
    params = SamplingParams(temperature=0, max_tokens=length)
    for run in ("cold", "warm"):
        contexts = [engine.add(str(index), prompts[index], params) for index in chosen]
        while engine.has_work:
            for context in tuple(engine.scheduler.running):
                at_border = context.num_computed_tokens % BLOCK_SIZE in (BLOCK_SIZE - 1, 0, 1)
                late = len(context.output_token_ids) == 5
                if context.num_preemptions == 0 and context.num_computed_tokens and (at_border or late):
                    engine.preempt(context.context_id)
            engine.step()
            engine.scheduler.check()
        assert [engine.forget(context.context_id).token_ids for context in contexts] == [
            outputs[index][:length] for index in chosen
        ]
        assert [context.num_preemptions for context in contexts] == [1] * len(chosen)
        if run == "warm":
            assert [context.num_cached_tokens for context in contexts] == [
                len(prompts[index]) // BLOCK_SIZE * BLOCK_SIZE for index in chosen
            ]
    engine.check_idle()


def test_preempted_at_every_position(prompts: list[list[int]], outputs: list[list[int]]) -> None:
    """Context i loses its blocks when it has i output tokens, which passes the border at 32; nothing is left cached."""
    prompt, positions = prompts[13], 20
    assert len(prompt) < BLOCK_SIZE - 1 < BLOCK_SIZE + 1 < len(prompt) + positions
    engine = build(max_num_seqs=positions, kv_cache_memory_bytes=1 << 28)
    params = SamplingParams(temperature=0, max_tokens=positions + 1)
    contexts = [engine.add(str(index), prompt, params) for index in range(1, positions + 1)]
    while engine.has_work:
        for context in tuple(engine.scheduler.running):
            if context.num_preemptions == 0 and len(context.output_token_ids) == int(context.context_id):
                engine.preempt(context.context_id)
                engine.pool.release(engine.pool.allocate(engine.pool.num_available))
        engine.step()
    made = [engine.forget(context.context_id).token_ids for context in contexts]
    assert made == [outputs[13][: positions + 1]] * positions
    assert [context.num_preemptions for context in contexts] == [1] * positions
    engine.check_idle()


def test_a_pool_so_small_that_contexts_are_preempted(
    prompts: list[list[int]], outputs: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(max_num_seqs=8, kv_cache_memory_bytes=8 * SMOLLM2_BYTES_PER_BLOCK)
    # A forecast that is always too low, so that too many are admitted.
    monkeypatch.setattr(engine.scheduler.forecast, "remaining", lambda context: 1)
    chosen, length = range(9, 17), 16
    params = SamplingParams(temperature=0, max_tokens=length)
    contexts = [engine.add(str(index), prompts[index], params) for index in chosen]
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    made = [engine.forget(context.context_id).token_ids for context in contexts]
    assert made == [outputs[index][:length] for index in chosen]
    assert sum(context.num_preemptions for context in contexts) >= 3
    engine.check_idle()


def test_bfloat16_makes_sense_and_is_the_same_in_company() -> None:
    engine = build("bfloat16", kv_cache_memory_bytes=1 << 26)
    params = SamplingParams(temperature=0, max_tokens=6)
    (alone,) = engine.generate(["The capital of France is"], params)
    assert "Paris" in alone.text
    together = engine.generate([*passages(3), "The capital of France is"], params)
    assert together[-1].token_ids == alone.token_ids
    engine.check_idle()
