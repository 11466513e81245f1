"""Random lives of an engine: adds, aborts and steps in any order, over pools from roomy to far too small.

After each step the page tables, the pool and the states are validated; every output must equal what the model gives to
that prompt alone, so neighbours, chunks, shared blocks, guesses and preemption change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from batonq.engine.context import LEGAL_TRANSITIONS, Context, FinishReason
from batonq.engine.engine import Engine
from batonq.engine.errors import ContextLengthExceeded
from batonq.engine.sampling_params import SamplingParams
from batonq.engine.scheduler import MAX_OPTIMISTIC_PREEMPTIONS
from tests.support import null_engine
from tests.support.definition import alone
from tests.support.null_engine import logprobs_of


@dataclass
class Expected:
    prompt: list[int]
    context: Context
    aborted: bool = False
    forced_preemptions: int = 0
    seen: list[int] = field(default_factory=list)


# Few distinct tokens and lengths around block borders, so that prefixes are shared often.
prompts = st.lists(st.integers(1, 2), min_size=1, max_size=24)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
    max_tokens=st.one_of(st.none(), st.integers(1, 40)),
    min_tokens=st.just(0),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (7, 8, 9)]),
    prompt_logprobs=st.sampled_from([None, None, 1]),
)


class EngineLife(RuleBasedStateMachine):
    engine: Engine[list[list[int]]]

    @initialize(
        num_blocks=st.integers(4, 40),
        max_num_seqs=st.integers(1, 6),
        extra_budget=st.integers(0, 12),
        max_model_len=st.integers(8, 64),
        order=st.sampled_from([0, 1, 2]),
        num_speculative_tokens=st.sampled_from([0, 1, 3, 8, 8]),
    )
    def start(
        self,
        num_blocks: int,
        max_num_seqs: int,
        extra_budget: int,
        max_model_len: int,
        order: int,
        num_speculative_tokens: int,
    ) -> None:
        self.engine = null_engine.build(
            num_blocks,
            max_model_len,
            max_num_seqs,
            max_num_seqs + extra_budget,
            order=order,
            num_speculative_tokens=num_speculative_tokens,
        )
        self.order = order
        self.expected: dict[str, Expected] = {}
        self.ended: dict[str, Expected] = {}
        self.count = 0

    @rule(prompt=prompts, params=params, done=st.one_of(st.just(0), st.integers(0, 40)))
    def add(self, prompt: list[int], params: SamplingParams, done: int) -> None:
        """A new context, or one that is carried on after `done` tokens, or was complete by then."""
        self.count += 1
        name = f"c{self.count}"
        room = min(self.engine.limits.max_model_len, self.engine.limits.kv_cache_tokens) - len(prompt)
        if room < 1:
            with pytest.raises(ContextLengthExceeded, match=f"the input has {len(prompt)} tokens"):
                self.engine.add(name, prompt, params)
            assert name not in self.engine.contexts
            return
        max_tokens = min(params.max_tokens or room, room)
        outputs = alone(prompt, params.model_copy(update={"max_tokens": max_tokens}), self.order)[:done]
        context = self.engine.add(name, prompt, params, output_token_ids=outputs)
        assert context.max_tokens == max_tokens
        self.expected[name] = Expected(prompt, context, seen=list(outputs))

    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        if self.expected:
            name = list(self.expected)[pick % len(self.expected)]
            self.expected[name].aborted = not self.expected[name].context.state.ended
            self.engine.abort(name)
            self.finish(name)

    @rule(pick=st.integers(0, 99))
    def preempt(self, pick: int) -> None:
        running = self.engine.scheduler.running
        if running:
            name = running[pick % len(running)].context_id
            self.engine.preempt(name)
            self.expected[name].forced_preemptions += 1

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.one_step()

    def one_step(self) -> None:
        output = self.engine.step()
        assert output.num_tokens <= self.engine.config.max_num_batched_tokens
        assert output.num_tokens > 0 or output.outputs or not self.expected, "contexts wait and nothing is done"
        self.engine.scheduler.check()
        for part in output.outputs:
            expected = self.expected[part.context_id]
            expected.seen += part.new_token_ids
            if part.finish_reason is not None:
                self.finish(part.context_id)

    def finish(self, name: str) -> None:
        expected = self.expected.pop(name)
        context = expected.context
        generation = self.engine.forget(name)
        whole = alone(expected.prompt, context.sampling_params, self.order)
        assert generation.token_ids == expected.seen
        if expected.aborted:
            assert generation.finish_reason is FinishReason.ABORT
            assert generation.token_ids == whole[: len(generation.token_ids)]
        else:
            assert generation.token_ids == whole
            if context.sampling_params.prompt_logprobs is not None:
                rest = (
                    logprobs_of(expected.prompt[:at], expected.prompt[at], 1) for at in range(1, len(expected.prompt))
                )
                assert generation.prompt_logprobs == [None, *rest]
        for change in context.debug_info:
            assert change.target in LEGAL_TRANSITIONS[change.source]
        self.ended[name] = expected

    @invariant()
    def bounded_preemption(self) -> None:
        for expected in getattr(self, "expected", {}).values():
            by_itself = expected.context.num_preemptions - expected.forced_preemptions
            assert by_itself <= MAX_OPTIMISTIC_PREEMPTIONS

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(10_000):
            if not self.engine.has_work:
                break
            self.one_step()
        assert not self.expected, "a context never ended"
        self.engine.check_idle()


TestEngineLife = EngineLife.TestCase
TestEngineLife.settings = settings(
    max_examples=2000, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_steps_hold_those_that_run_alone_and_nobody_loses_by_it() -> None:
    """Others keep their blocks and go on afterwards, to the same tokens."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    engine = null_engine.build(num_blocks=64, max_num_seqs=2)
    contexts = {name: engine.add(name, list(name.encode()) * 5, params) for name in ("first", "second")}
    for _ in range(4):
        engine.step()
    held = {name: list(context.block_table) for name, context in contexts.items()}
    engine.scheduler.alone.add("suspect")
    engine.add("suspect", [1, 2, 3], params)
    output = engine.step()
    assert {part.context_id for part in output.outputs} == {"suspect"}, "a step held somebody else"
    assert output.preempted == ("second",), "there are two places, so the youngest makes room"
    assert contexts["first"].block_table == held["first"]
    engine.scheduler.alone.clear()
    while engine.has_work:
        engine.step()
    for name, context in {**contexts, "suspect": engine.contexts["suspect"]}.items():
        assert context.output_token_ids == alone(list(context.input_token_ids), params), name
        engine.forget(name)
    engine.check_idle()


def test_one_that_runs_alone_takes_blocks_that_it_needs() -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    engine = null_engine.build(num_blocks=24)
    for name in ("first", "second", "third"):
        engine.add(name, list(name.encode()), params.model_copy(update={"max_tokens": 20}))
    while not all(context.output_token_ids for context in engine.contexts.values()):
        engine.step()
    engine.scheduler.alone.add("suspect")
    suspect = engine.add("suspect", [1] * 30, params)
    while not suspect.output_token_ids:
        assert {part.context_id for part in engine.step().outputs} <= {"suspect"}
    engine.scheduler.alone.clear()
    while engine.has_work:
        engine.step()
    assert suspect.output_token_ids == alone([1] * 30, params)
