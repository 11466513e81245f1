"""Guessed tokens: where they come from, that they are worth their rows, and that they change no output.

Any life of an engine with guesses is `test_scheduler_properties.py`'s; the bits are `test_exactness.py`'s.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonq.engine.config import EngineConfig
from batonq.engine.context import Context, FinishReason
from batonq.engine.engine import Engine, Generation
from batonq.engine.errors import EngineError
from batonq.engine.loading import EngineOptions, load_engine
from batonq.engine.plan import Plan, Samples
from batonq.engine.sampling_params import SamplingParams
from batonq.engine.speculation import FIXED_ROWS, LOOKBACK, PromptLookup, choose_guesses
from batonq.engine.text import TextState, Vocabulary
from tests.support import null_engine, scripted_engine, tiny_models
from tests.support.definition import alone

#: Of the tiny models.
VOCAB_SIZE = 130

few_tokens = st.lists(st.integers(0, 3), max_size=60)


def defined(tokens: Sequence[int], count: int) -> tuple[int, ...]:
    """What follows the last earlier occurrence of the last three tokens, or else of the last two."""
    for length in (3, 2):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                return tuple(tokens[end + i % (len(tokens) - end)] for i in range(count))
    return ()


@given(few_tokens, st.integers(1, 9))
def test_guesses_are_what_followed_last_time(tokens: list[int], count: int) -> None:
    assert PromptLookup(tokens).guess(count) == defined(tokens, count)


@given(few_tokens, few_tokens, st.integers(1, 9))
def test_a_guess_that_came_true_is_followed_on(prompt: list[int], output: list[int], count: int) -> None:
    lookup = PromptLookup(prompt)
    for i, token in enumerate(output):
        guess = lookup.guess(count)
        lookup.push(token)
        if guess and guess[0] == token:
            assert lookup.guess(count - 1) == guess[1:], "it went on elsewhere"
        else:
            assert lookup.guess(count) == defined([*prompt, *output[: i + 1]], count)


@given(few_tokens)
def test_chance_follows_what_came_of_the_guesses(output: list[int]) -> None:
    lookup = PromptLookup([])
    for token in output:
        guess, before = lookup.guess(1), lookup.chance
        lookup.push(token)
        assert 0 < lookup.chance < 1
        assert (lookup.chance > before) == (guess == (token,))
        assert (lookup.chance < before) == (guess not in ((), (token,)))


def test_tokens_are_not_found_across_their_borders() -> None:
    """The bytes of 1, 256 · 1 … occur at odd places in those of other tokens."""
    shifted = [0x01000000, 0x02000000, 0, 7, 1, 2]
    assert PromptLookup(shifted).guess(3) == ()
    assert PromptLookup([1, 2, 9, *shifted]).guess(1) == (9,)


def test_only_so_far_back() -> None:
    near, far = range(10, LOOKBACK + 4), range(10, LOOKBACK + 10)
    assert PromptLookup([1, 2, 3, *near[: LOOKBACK - 5], 1, 2]).guess(1) == (3,)
    assert PromptLookup([1, 2, 3, *far, 1, 2]).guess(1) == ()


def decoding(name: str, tokens: Sequence[int], output: Sequence[int], **params: object) -> Context:
    asked = SamplingParams.model_validate({"seed": 1, "max_tokens": 100, **params})
    context = Context(name, tuple(tokens), asked, TextState(Vocabulary([b"a"] * 9, frozenset()), ()))
    context.lookup = PromptLookup(tokens)
    for token in output:
        context.accept(token, frozenset())
    return context


def test_the_surer_the_longer() -> None:
    sure = decoding("sure", [1, 2] * 9, [1, 2] * 9)
    fair = decoding("fair", [3, 4] * 9, [])
    nothing = decoding("nothing", [5, 6], [])
    contexts = [nothing, fair, sure]
    drafts = choose_guesses(contexts, most=8, budget=64)
    assert drafts["sure"] == (1, 2) * 4, "a context gets no more than the most"
    assert drafts["fair"] == (3, 4, 3)[: len(drafts["fair"])]
    assert "nothing" not in drafts
    assert choose_guesses(contexts, most=1, budget=9) == {"sure": (1,), "fair": (3,)}
    assert choose_guesses([sure, fair], most=8, budget=9) == {"sure": (1, 2) * 4, "fair": (3,)}
    assert choose_guesses([sure, fair], most=8, budget=2) == {"sure": (1, 2)}
    assert choose_guesses(contexts, most=8, budget=0) == {}


def test_in_a_full_step_only_sure_ones_are_worth_a_row() -> None:
    sure = [decoding(f"sure {i}", [1, 2] * 9, [1, 2] * 12) for i in range(32)]
    unsure = [decoding(f"unsure {i}", [3, 4] * 9, []) for i in range(32)]
    chosen = choose_guesses([*unsure, *sure], most=8, budget=1000)
    assert set(chosen) == {context.context_id for context in sure}
    assert {len(draft) for draft in chosen.values()} <= set(range(1, 8)), (
        "the chance of the eighth is that of all eight"
    )
    few = unsure[: FIXED_ROWS // 2]
    assert set(choose_guesses(few, 8, 1000)) == {context.context_id for context in few}


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"bad_words_token_ids": ((1, 2),)},
        {"logprobs": 0},
    ],
)
def test_none_where_a_draw_depends_on_the_ones_before(params: dict[str, object]) -> None:
    engine = scripted_engine.build({}, Vocabulary([b"a"] * 9, frozenset()), frozenset(), 9, 90, {})
    assert engine.add("plain", [1, 2] * 9, SamplingParams(max_tokens=9)).lookup is not None
    assert engine.add("other", [1, 2] * 9, SamplingParams.model_validate({"max_tokens": 9, **params})).lookup is None


def test_none_while_the_next_draw_may_not_end_it() -> None:
    waiting = decoding("x", [1, 2] * 9, [1, 2], min_tokens=3)
    assert choose_guesses([waiting], 8, 64) == {}
    waiting.accept(1, frozenset())
    assert choose_guesses([waiting], 8, 64) != {}


@pytest.mark.parametrize("left", [1, 2, 3])
def test_none_behind_the_last_token(left: int) -> None:
    context = decoding("x", [1, 2] * 9, [1, 2], max_tokens=2 + left)
    assert choose_guesses([context], 8, 64).get("x", ()) == (1, 2, 1)[: left - 1]


class Noting:
    """A runner that keeps what it is asked to compute."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []

    def __call__(self, plan: Plan) -> None:
        self.plans.append(plan)

    @property
    def guesses(self) -> int:
        return sum(len(row.guesses) for plan in self.plans for row in plan.rows)


def steps_of(engine: Engine[list[list[int]]], prompt: list[int], params: SamplingParams) -> tuple[list[int], int]:
    context, steps = engine.add("x", prompt, params), 0
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
        steps += 1
    engine.forget("x")
    engine.check_idle()
    return context.output_token_ids, steps


@pytest.mark.parametrize("order", [1, 2])
def test_several_tokens_a_step(order: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    expected = alone([5, 6, 7], params, order)
    slow = null_engine.build(max_num_batched_tokens=16, order=order, num_speculative_tokens=0)
    assert steps_of(slow, [5, 6, 7], params) == (expected, 100)
    output, steps = steps_of(null_engine.build(max_num_batched_tokens=16, order=order), [5, 6, 7], params)
    assert output == expected
    assert steps < 70


def test_an_end_among_the_guesses_ends_it() -> None:
    """EOS, a stop token, a stop string and the last token, each where the guesses went on."""
    vocabulary = Vocabulary([b"", *(bytes([97 + i]) for i in range(8))], frozenset())
    script = [1, 2, 3] * 20
    ends = {
        "eos": (SamplingParams(max_tokens=60), FinishReason.STOP),
        "token": (SamplingParams(max_tokens=60, stop_token_ids=(3,), min_tokens=0), FinishReason.STOP),
        "string": (SamplingParams(max_tokens=60, stop=("abcabcabcabcab",)), FinishReason.STOP),
        "length": (SamplingParams(max_tokens=23), FinishReason.LENGTH),
    }
    cut = {"eos": 31, "token": 3, "string": 14, "length": 23}
    scripts = {name: list(script) for name in ends}
    scripts["eos"][30:] = [8]
    engine = scripted_engine.build(scripts, vocabulary, frozenset({8}), 20, 100, {})
    noting = engine.on_plan = Noting()
    for name, (params, _) in ends.items():
        engine.add(name, [1, 2, 3, 1, 2, 3], params)
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    assert noting.guesses > 40
    for name, (_, reason) in ends.items():
        generation = engine.forget(name)
        assert (generation.token_ids, generation.finish_reason) == (scripts[name][: cut[name]], reason), name
    engine.check_idle()


class FailingSampler(scripted_engine.ScriptedSampler):
    """Draws nothing usable from position 20 on."""

    def sample(self, plan: Plan, logits: None) -> Samples:
        samples = super().sample(plan, logits)
        error = EngineError("invalid_logits", "NaN")
        tokens = [error if at >= 20 else token for token, (_, at) in zip(samples.tokens, plan.draws, strict=True)]
        return Samples(tokens, samples.logprobs, samples.prompt_logprobs)


@pytest.mark.parametrize("num_speculative_tokens", [0, 8])
def test_unusable_logits_behind_a_guess_spoil_no_token_before_them(num_speculative_tokens: int) -> None:
    vocabulary = Vocabulary([b"a"] * 9, frozenset())
    config = {"num_speculative_tokens": num_speculative_tokens}
    engine = scripted_engine.build({"x": [1, 2, 3] * 20}, vocabulary, frozenset(), 20, 100, config)
    engine.sampler = FailingSampler({"x": [1, 2, 3] * 20})
    engine.add("x", [1, 2, 3] * 3, SamplingParams(max_tokens=60))
    while engine.has_work:
        engine.step()
    generation = engine.forget("x")
    assert generation.finish_reason is FinishReason.ERROR
    assert generation.token_ids == ([1, 2, 3] * 20)[: 20 - 8]


def test_blocks_for_guesses_are_taken_from_nobody() -> None:
    """A forecast that is too low fills the pool: where known tokens lack blocks, nobody guesses."""
    engine = null_engine.build(num_blocks=20, max_num_batched_tokens=32, order=2)
    engine.generate([[index] for index in range(100)], SamplingParams(max_tokens=1))
    noting = engine.on_plan = Noting()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    contexts = [engine.add(str(i), [i, 1, 2, 3], params) for i in range(8)]
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    for context in contexts:
        assert context.output_token_ids == alone(list(context.input_token_ids), params, 2)
        engine.forget(context.context_id)
    preempting = [plan for plan in noting.plans if plan.preempted]
    assert preempting
    assert noting.guesses > 40
    assert not any(row.guesses for plan in preempting for row in plan.rows)


def test_a_resumed_context_guesses_from_its_first_step_on() -> None:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    whole = alone([5, 6, 7], params, 2)
    engine = null_engine.build(max_num_batched_tokens=64, order=2)
    noting = engine.on_plan = Noting()
    engine.add("x", [5, 6, 7], params, output_token_ids=whole[:50])
    outputs = []
    while engine.has_work:
        outputs += [token for part in engine.step().outputs for token in part.new_token_ids]
    assert outputs == whole[50:]
    assert noting.plans[1].rows[0].guesses
    engine.forget("x")


def test_blocks_filled_by_guesses_are_shared_and_wrong_ones_never() -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompt = [5, 6, 7, 8, 9]
    engine = null_engine.build(num_blocks=64, max_num_batched_tokens=16, order=2)
    output, _ = steps_of(engine, prompt, params)
    whole = [*prompt, *output]
    for count in (10, 33, 61):
        again = engine.add(f"again {count}", whole[:count], params.model_copy(update={"max_tokens": 1}))
        engine.step()
        assert again.num_cached_tokens == count // null_engine.BLOCK_SIZE * null_engine.BLOCK_SIZE
        assert again.output_token_ids == [whole[count]]
        engine.forget(again.context_id)
    engine.check_idle()


def requests(count: int, longest: int, vocabulary: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that repeat themselves, greedy and sampled, some with parameters that bend the logits."""
    chance, made = random.Random(9), []
    for i in range(count):
        phrase = chance.choices(range(3, vocabulary), k=chance.randint(2, 12))
        bend = ({}, {"logit_bias": {phrase[0]: 4.0}}, {"allowed_token_ids": tuple(phrase)}, {"min_tokens": 7})[i % 4]
        params = {"temperature": (0.0, 0.3, 1.0)[i % 3], "seed": i, "max_tokens": 60, "ignore_eos": bool(i % 2)}
        made.append(((phrase * 40)[: chance.randint(1, longest)], SamplingParams.model_validate({**params, **bend})))
    return made


@pytest.mark.parametrize(("count", "most"), [(1, 1), (6, 8), (40, 8)])
def test_a_tiny_model_draws_the_same(count: int, most: int, tmp_path: Path) -> None:
    tiny_models.save("gqa3-untied", tmp_path)
    tiny_models.save_tokenizer(tmp_path)
    asked = requests(40, 90, VOCAB_SIZE)
    prompts, params = [prompt for prompt, _ in asked], [each for _, each in asked]
    plain = tiny_models.engine(tmp_path, num_speculative_tokens=0).generate(prompts, params)
    engine = tiny_models.engine(tmp_path, max_num_seqs=count, num_speculative_tokens=most)
    noting = engine.on_plan = Noting()
    assert engine.generate(prompts, params) == plain
    assert noting.guesses > 40
    engine.check_idle()


def test_smollm2_draws_the_same_in_fewer_rows() -> None:
    asked = requests(12, 60, 49152)
    prompts, params = [prompt for prompt, _ in asked], [each for _, each in asked]
    outputs: list[list[Generation]] = []
    computed: list[int] = []
    for most in (0, 8):
        config = EngineConfig(kv_cache_memory_bytes=1 << 28, num_speculative_tokens=most)
        engine, _ = load_engine(EngineOptions("smollm2-135m", dtype="bfloat16", config=config).to_dict())
        noting = engine.on_plan = Noting()
        outputs.append(engine.generate(prompts, params))
        computed.append(sum(len(plan.sampling_rows) for plan in noting.plans))
    assert outputs[0] == outputs[1]
    assert computed[0] == sum(len(output.token_ids) for output in outputs[0])
    assert computed[1] < 0.9 * computed[0]


def test_the_number_is_checked() -> None:
    with pytest.raises(EngineError, match="num_speculative_tokens must be at least 0, got -1"):
        EngineConfig(num_speculative_tokens=-1)
