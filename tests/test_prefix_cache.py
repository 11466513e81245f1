"""The prefix cache over the null engine: who shares which block when, what is never shared, and what is evicted first.

The null runner fails on any row that reads a wrong token and on any second write to a published block.
"""

from __future__ import annotations

import random

import pytest

from batonq.engine.block_pool import BlockKey, BlockPool
from batonq.engine.context import Context
from batonq.engine.engine import Engine
from batonq.engine.errors import EngineBusy
from batonq.engine.sampling_params import SamplingParams
from tests.support import null_engine
from tests.support.definition import alone

NullEngine = Engine[list[list[int]]]

#: Five blocks of 4.
PROMPT = list(range(1, 21))
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def finish(engine: NullEngine) -> dict[str, list[int]]:
    """Runs all contexts to their ends and validates each step; outputs by id."""
    outputs: dict[str, list[int]] = {}
    while engine.has_work:
        for part in engine.step().outputs:
            if part.finish_reason is not None:
                outputs[part.context_id] = engine.forget(part.context_id).token_ids
        engine.scheduler.check()
    engine.check_idle()
    return outputs


def cached(context: Context) -> int:
    assert context.num_cached_tokens is not None
    return context.num_cached_tokens


def test_prefixes_are_matched_at_the_first_schedule_not_when_added() -> None:
    engine = null_engine.build(max_num_seqs=1, max_num_batched_tokens=32)
    engine.add("first", PROMPT, PARAMS)
    late = engine.add("late", [*PROMPT[:12], 99, 98], PARAMS)
    assert late.num_cached_tokens is None
    outputs = finish(engine)
    assert cached(late) == 12
    assert outputs["late"] == alone([*PROMPT[:12], 99, 98], PARAMS)


def test_contexts_that_arrive_in_one_step_share() -> None:
    engine = null_engine.build(max_num_batched_tokens=32)
    first = engine.add("first", PROMPT, PARAMS)
    same = engine.add("same", PROMPT, PARAMS)
    longer = engine.add("longer", [*PROMPT, 50, 51], PARAMS)
    step = engine.step()
    assert step.started == ("first", "same", "longer")
    assert step.num_tokens == 20 + 1 + 2
    assert (cached(first), cached(same), cached(longer)) == (0, 20, 20)
    assert first.block_table == same.block_table == longer.block_table[:5]
    outputs = finish(engine)
    assert outputs["first"] == outputs["same"] == alone(PROMPT, PARAMS)
    assert outputs["longer"] == alone([*PROMPT, 50, 51], PARAMS)


def test_a_prefix_cache_that_was_reset_gives_nothing() -> None:
    engine = null_engine.build(max_num_batched_tokens=32)
    engine.add("running", PROMPT, PARAMS)
    engine.step()
    with pytest.raises(EngineBusy, match="1 contexts"):
        engine.reset_prefix_cache()
    finish(engine)
    warm = engine.add("warm", PROMPT, PARAMS)
    finish(engine)
    assert cached(warm) == 20
    engine.reset_prefix_cache()
    engine.scheduler.check()
    cold = engine.add("cold", PROMPT, PARAMS)
    assert finish(engine)["cold"] == alone(PROMPT, PARAMS)
    assert cached(cold) == 0


@pytest.mark.parametrize("length", range(1, 21))
def test_a_warm_prompt_computes_what_is_not_cached_and_one_row_at_least(length: int) -> None:
    engine = null_engine.build(max_num_batched_tokens=32)
    (cold,) = engine.generate([PROMPT[:length]], PARAMS)
    engine.add("warm", PROMPT[:length], PARAMS)
    step = engine.step()
    blocks = length // null_engine.BLOCK_SIZE
    # The generated tokens of the cold run follow the prompt in the cache, but are no part of this one.
    assert step.num_tokens == max(1, length - blocks * null_engine.BLOCK_SIZE)
    assert cached(engine.contexts["warm"]) == blocks * null_engine.BLOCK_SIZE
    assert finish(engine)["warm"] == cold.token_ids == alone(PROMPT[:length], PARAMS)


def test_waiters_take_over_what_an_aborted_writer_has_computed() -> None:
    engine = null_engine.build(max_num_batched_tokens=8)
    engine.add("writer", PROMPT, PARAMS)
    waiter = engine.add("waiter", PROMPT, PARAMS)
    engine.step()
    assert waiter.num_cached_tokens is None  # the writer has the whole budget
    engine.abort("writer")
    engine.forget("writer")
    step = engine.step()
    assert step.num_tokens == 8
    assert cached(waiter) == 8
    assert waiter.num_computed_tokens == 16
    assert finish(engine)["waiter"] == alone(PROMPT, PARAMS)


def test_a_step_that_fails_publishes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = null_engine.build(max_num_batched_tokens=32)
    with monkeypatch.context() as patch:
        patch.setattr(engine.sampler, "sample", lambda plan, logits: 1 // 0)
        engine.add("first", PROMPT, PARAMS)
        engine.add("same", PROMPT, PARAMS)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.scheduler.check()
    assert engine.pool.num_held == 0
    assert engine.pool.lookup(None, PROMPT[:4]) is None
    assert finish(engine) == dict.fromkeys(("first", "same"), alone(PROMPT, PARAMS))


def test_a_preempted_context_takes_its_own_blocks_again() -> None:
    engine = null_engine.build(max_num_batched_tokens=32)
    context = engine.add("c", PROMPT, PARAMS)
    engine.step()
    engine.preempt("c")
    assert (context.num_computed_tokens, context.block_table, context.num_preemptions) == (0, [], 1)
    engine.scheduler.check()
    assert engine.step().num_tokens == 1  # five blocks are there, and the first output token
    assert finish(engine)["c"] == alone(PROMPT, PARAMS)
    engine.preempt("c")  # unknown now, and nothing happens


def chain(pool: BlockPool, *contents: tuple[int, ...]) -> tuple[list[int], list[BlockKey]]:
    """Blocks with these contents, held and published one after another."""
    blocks = pool.allocate(len(contents))
    keys: list[BlockKey] = []
    for block, tokens in zip(blocks, contents, strict=True):
        keys.append(pool.publish(block, keys[-1] if keys else None, tokens))
    return blocks, keys


def test_the_least_recently_used_leaf_goes_first() -> None:
    pool = BlockPool(6, 2)
    old, _ = chain(pool, (1, 2), (3, 4), (5, 6))
    new, _ = chain(pool, (7, 8), (9, 10), (11, 12))
    pool.release(old)
    pool.release(new)
    pool.share(old[:1])  # used again, and let go of last
    pool.release(old[:1])
    order = [pool.allocate(1)[0] for _ in range(6)]
    assert order == [old[2], old[1], new[2], new[1], new[0], old[0]]
    assert pool.lookup(None, (1, 2)) is None
    pool.check([[block] for block in order])


def test_eviction_shortens_a_prefix_and_never_hollows_it_out() -> None:
    pool = BlockPool(5, 2)
    blocks, _ = chain(pool, (1, 2), (3, 4), (5, 6), (7, 8), (9, 10))
    pool.release(blocks)
    for left in (4, 3, 2, 1, 0):
        taken = pool.allocate(5 - left)
        parent, found = None, 0
        for first in range(1, 11, 2):
            hit = pool.lookup(parent, (first, first + 1))
            if hit is None:
                break
            parent, found = hit[1], found + 1
        assert found == left
        pool.release(taken)


def test_a_collision_of_names_does_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BlockPool(8, 2)
    monkeypatch.setattr(pool, "name_of", lambda parent, tokens: b"the same")
    first, keys = chain(pool, (1, 2))
    assert pool.lookup(None, (1, 2)) == (first[0], keys[0])
    assert pool.lookup(None, (3, 4)) is None
    assert pool.lookup(keys[0], (1, 2)) is None
    other, other_keys = chain(pool, (3, 4), (1, 2))
    assert not any(pool.is_published(block) for block in other)
    assert pool.lookup(other_keys[0], (1, 2)) is None
    pool.check([first, other])


@pytest.mark.parametrize("bits", [0, 1, 3])
def test_lives_in_which_names_collide_all_the_time(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(bits)
    engine = null_engine.build(num_blocks=24, max_model_len=40, max_num_batched_tokens=24)
    real = engine.pool.name_of
    monkeypatch.setattr(
        engine.pool, "name_of", lambda parent, tokens: bytes([real(parent, tokens)[0] & ((1 << bits) - 1)])
    )
    prompts = [[chance.randint(1, 2) for _ in range(chance.randint(1, 24))] for _ in range(150)]
    hits = 0
    outputs: dict[str, list[int]] = {}
    for start in range(0, len(prompts), 15):
        contexts = [engine.add(str(i), prompts[i], PARAMS) for i in range(start, start + 15)]
        outputs |= finish(engine)
        hits += sum(map(cached, contexts))
    assert hits > 0
    assert outputs == {str(index): alone(prompt, PARAMS) for index, prompt in enumerate(prompts)}
