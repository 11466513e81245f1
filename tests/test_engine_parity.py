"""SmolLM2 through the whole engine against transformers' own `generate`, greedy, token for token."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from batonq.engine.config import EngineConfig
from batonq.engine.engine import Engine
from batonq.engine.loading import EngineOptions, load_engine
from batonq.engine.sampling_params import SamplingParams
from tests.support.models import smollm2_dir
from tests.support.prompts import passages

NEW_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)


@pytest.fixture(scope="module")
def engine() -> Engine[torch.Tensor]:
    config = EngineConfig(max_num_batched_tokens=256, kv_cache_memory_bytes=1 << 29)
    return load_engine(EngineOptions("smollm2-135m", config=config).to_dict())[0]


@pytest.fixture(scope="module")
def prompts(engine: Engine[torch.Tensor]) -> list[list[int]]:
    """Twenty prompts of 3 to 45 tokens, four of them conversations."""
    texts = passages(16)
    plain = [engine.encoder.encode(text)[: 3 + 2 * i] for i, text in enumerate(texts)]
    chats = [
        engine.encoder.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        for question in ("What is the capital of France?", "Name three colours.", "Why is the sky blue?", "Say hello.")
    ]
    return plain + chats


@pytest.fixture(scope="module")
def oracle(prompts: list[list[int]]) -> list[list[int]]:
    """What transformers makes of each prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir(), dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=2,
            pad_token_id=2,
        )
        outputs.append(made[0, len(prompt) :].tolist())
    return outputs


def test_greedy_alone(engine: Engine[torch.Tensor], prompts: list[list[int]], oracle: list[list[int]]) -> None:
    for prompt, expected in zip(prompts, oracle, strict=True):
        (generation,) = engine.generate([prompt], GREEDY)
        assert generation.token_ids == expected
        engine.check_idle()


def test_greedy_in_a_crowd_that_joins_and_leaves(
    engine: Engine[torch.Tensor], prompts: list[list[int]], oracle: list[list[int]]
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
    outputs: dict[str, list[int]] = {}
    while arrivals or engine.has_work:
        for _ in range(min(len(arrivals), 8)):
            engine.add(*arrivals.pop())
        for part in engine.step().outputs:
            if part.finish_reason is not None:
                outputs[part.context_id] = engine.forget(part.context_id).token_ids
        together = max(together, len(engine.scheduler.running))
        engine.scheduler.check()
        if chance.random() < 0.1:
            for name in [name for name in engine.contexts if name.startswith("stranger")][:1]:
                engine.abort(name)
                engine.forget(name)
    engine.check_idle()
    assert together > 32, "there was no crowd"
    assert [outputs[f"wanted-{i}"] for i in range(len(prompts))] == oracle
