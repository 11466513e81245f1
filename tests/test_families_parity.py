"""Tiny models of every family through the whole engine against transformers, greedy, token for token.

Outputs made in one crowd are proven by transformers; every other way to run must give the very same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from batonq.engine.context import Context
from batonq.engine.engine import Engine
from batonq.engine.sampling_params import SamplingParams
from batonq.kernels.cpu_library import ISA_VARIABLE
from batonq.kernels.logits import Logits
from batonq.kernels.program import BLOCK_SIZE
from tests.support import tiny_models
from tests.support.greedy import assert_greedy

NEW_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
VOCAB_SIZE = 160

#: Lengths around block borders, and one block or two exactly; Mistral's window of 24 is shorter than most.
LENGTHS = (1, 2, 8, 31, 32, 33, 50, 63, 64, 65, 95, 100)

TinyEngine = Engine[Logits]


@dataclass(frozen=True)
class Family:
    directory: Path
    oracle: PreTrainedModel
    prompts: list[list[int]]
    #: By prompt; proven by transformers.
    outputs: list[list[int]]

    @property
    def few(self) -> range:
        """The prompts with `LENGTHS`, for what takes longer."""
        return range(len(LENGTHS))


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    """Every other one begins like the one before it; otherwise nothing is shared."""
    chance = np.random.default_rng(11)
    prompts: list[list[int]] = []
    for index, length in enumerate(lengths):
        shared = prompts[-1][:40] if index % 2 and index > len(LENGTHS) else []
        prompts.append([*shared, *chance.integers(3, VOCAB_SIZE, length).tolist()][:length])
    return prompts


def no_preemption(context: Context) -> bool:
    return False


def run(
    engine: TinyEngine,
    prompts: Sequence[list[int]],
    preempt: Callable[[Context], bool] = no_preemption,
    params: SamplingParams = GREEDY,
    keep_cache: bool = True,
) -> tuple[list[list[int]], list[Context]]:
    """Outputs and contexts of prompts run together; before each step those are preempted that `preempt` wants to be."""
    contexts = [engine.add(str(index), prompt, params) for index, prompt in enumerate(prompts)]
    while engine.has_work:
        for context in tuple(engine.scheduler.running):
            if preempt(context):
                engine.preempt(context.context_id)
                if not keep_cache:
                    engine.pool.release(engine.pool.allocate(engine.pool.num_available))
        engine.step()
        engine.scheduler.check()
    outputs = [engine.forget(context.context_id).token_ids for context in contexts]
    engine.check_idle()
    return outputs, contexts


@pytest.fixture(scope="module", params=[*tiny_models.FAMILIES, "mistral in torch"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    name, *backend = request.param.split(" in ")
    with pytest.MonkeyPatch.context() as patch:
        for isa in backend:
            patch.setenv(ISA_VARIABLE, isa)
        yield made_family(name, tmp_path_factory.mktemp(name))


def made_family(name: str, directory: Path) -> Family:
    oracle = tiny_models.save(tiny_models.FAMILIES[name], directory)
    tiny_models.save_tokenizer(directory)
    prompts = prompts_of([*LENGTHS, *np.random.default_rng(3).integers(1, 101, 64 - len(LENGTHS)).tolist()])
    engine = tiny_models.engine(directory)
    outputs, contexts = run(engine, prompts)
    assert sum(context.num_cached_tokens or 0 for context in contexts) >= 32, "nothing was shared"
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(oracle, prompt, output)
    return Family(directory, oracle, prompts, outputs)


def test_transformers_generates_the_same(family: Family) -> None:
    for index in (2, 8, 11):
        ids = torch.tensor([family.prompts[index]])
        made = family.oracle.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)  # type: ignore[operator]
        assert made[0, ids.shape[1] :].tolist() == family.outputs[index]


def test_alone(family: Family) -> None:
    engine = tiny_models.engine(family.directory, num_blocks=4)
    for index in family.few:
        assert run(engine, [family.prompts[index]])[0] == [family.outputs[index]]


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(1, 1), (3, 5), (4, 7), (2, 31), (8, 32), (12, 33)])
def test_any_chunk_size(family: Family, max_num_seqs: int, budget: int) -> None:
    engine = tiny_models.engine(family.directory, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    indices = family.few[: 3 + 2 * budget]  # one token a step takes long
    assert run(engine, [family.prompts[i] for i in indices])[0] == [family.outputs[i] for i in indices]


def test_a_warm_cache_in_another_order(family: Family) -> None:
    engine = tiny_models.engine(family.directory, num_blocks=400)
    run(engine, family.prompts)
    outputs, contexts = run(engine, family.prompts[::-1])
    assert outputs == family.outputs[::-1]
    for context in contexts:
        assert context.num_cached_tokens == len(context.input_token_ids) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize(("guesses", "least"), [(0, 10), (8, 1)])
def test_a_pool_so_small_that_contexts_are_preempted(
    guesses: int, least: int, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With guesses some end before they are in each other's way."""
    engine = tiny_models.engine(family.directory, num_blocks=16, num_speculative_tokens=guesses)
    # A forecast that is always too low, so that too many are admitted.
    monkeypatch.setattr(engine.scheduler.forecast, "remaining", lambda context: 1)
    outputs, contexts = run(engine, family.prompts[:32])
    assert outputs == family.outputs[:32]
    assert sum(context.num_preemptions for context in contexts) >= least
    assert {change.reason for context in contexts for change in context.debug_info} >= {"out of blocks"}


@pytest.mark.parametrize("keep_cache", [True, False])
def test_preempted_at_every_position_of_the_output(family: Family, keep_cache: bool) -> None:
    """Context i loses its blocks when it has i output tokens; its token count is then 50 + i, which passes 64."""
    prompt, output = family.prompts[6], family.outputs[6]
    assert len(prompt) < 2 * BLOCK_SIZE - 1 < 2 * BLOCK_SIZE + 1 < len(prompt) + NEW_TOKENS
    engine = tiny_models.engine(family.directory, num_speculative_tokens=0)  # which would pass some by
    outputs, contexts = run(
        engine,
        [prompt] * NEW_TOKENS,
        lambda context: (
            context.num_preemptions == 0 and len(context.output_token_ids) == max(1, int(context.context_id))
        ),
        keep_cache=keep_cache,
    )
    assert outputs == [output] * NEW_TOKENS
    assert [context.num_preemptions for context in contexts] == [1] * NEW_TOKENS


def test_preempted_before_every_step(family: Family) -> None:
    """Each step gives a token from blocks that were all taken away before, whichever border lies near."""
    engine = tiny_models.engine(family.directory, num_blocks=5)
    for index in (2, 3, 4, 5, 8):
        outputs, (context,) = run(engine, [family.prompts[index]], lambda context: True, keep_cache=False)
        assert outputs == [family.outputs[index]]
        assert context.num_preemptions == NEW_TOKENS - 1


@pytest.mark.parametrize("keep_cache", [True, False])
@pytest.mark.parametrize("border", [BLOCK_SIZE, 2 * BLOCK_SIZE])
def test_preempted_at_block_borders_of_the_prompt(family: Family, border: int, keep_cache: bool) -> None:
    for computed in (border - 1, border, border + 1):
        engine = tiny_models.engine(family.directory, max_num_seqs=1, max_num_batched_tokens=computed)
        outputs, (context,) = run(
            engine,
            [family.prompts[11]],
            lambda context: (
                context.num_preemptions == 0 and context.num_computed_tokens in range(border - 1, border + 2)
            ),
            keep_cache=keep_cache,
        )
        assert outputs == [family.outputs[11]]
        assert context.num_preemptions == 1


@pytest.mark.parametrize("guesses", [0, 8])
def test_bfloat16_is_one_output_too(family: Family, guesses: int) -> None:
    """Near ties may fall otherwise than in float32, but never otherwise than in bfloat16 alone."""
    prompts = family.prompts[2:12:3]
    alone = tiny_models.engine(family.directory, dtype="bfloat16", max_num_seqs=1, num_speculative_tokens=0)
    expected = [run(alone, [prompt])[0][0] for prompt in prompts]
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 40, "num_speculative_tokens": guesses}
    engine = tiny_models.engine(family.directory, dtype="bfloat16", **limits)
    at = range(7, 7 + guesses + 1)  # one of these lengths is not passed by
    assert "bfloat16" in engine.spec.numerics_id
    for _ in ("cold", "warm"):
        outputs, contexts = run(engine, prompts * 4, lambda context: len(context.output_token_ids) in at)
        assert outputs == expected * 4
        assert all(context.num_preemptions for context in contexts)
