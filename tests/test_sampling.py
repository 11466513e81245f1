"""Sampling through the whole engine: every parameter on a tiny model with random weights.

Each token is checked against the contract spelt out one number at a time, with a history counted anew from the tokens;
and outputs are the same alone, shuffled, in crowds, preempted and resumed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from batonq.engine.bad_words import bad_word_sequences
from batonq.engine.engine import Engine, Generation
from batonq.engine.errors import EngineError
from batonq.engine.loading import Frontend
from batonq.engine.logprobs import TokenLogprobs, pack, unpack
from batonq.engine.plan import Plan, Samples
from batonq.engine.sampler import PlanSampler
from batonq.engine.sampling_params import SamplingParams, child_seed
from batonq.engine.scheduler import MAX_PROMPT_LOGITS
from batonq.engine.text import Vocabulary
from batonq.kernels.logits import Logits
from tests.support import null_engine, scripted_engine, tiny_models
from tests.support.models import smollm2_dir
from tests.support.sampling_contract import asked_of, draw

VOCAB_SIZE = 160
NEW_TOKENS = 24

TinyEngine = Engine[Logits]

#: Each parameter alone, and together; values strong enough to change what a tiny model says.
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy with filters": {"temperature": 0, "top_p": 0.3, "top_k": 7, "min_p": 0.2},
    "temperature": {"temperature": 1.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.1},
    "repetition": {"temperature": 0.5, "repetition_penalty": 1.8},
    "repetition wanted": {"repetition_penalty": 0.6},
    "presence": {"temperature": 0, "presence_penalty": 2.0},
    "frequency": {"temperature": 0, "frequency_penalty": 1.5},
    "frequency wanted": {"frequency_penalty": -2.0},
    "bias": {"logit_bias": {7: 6.0, 9: 5.5, 11: -100.0}},
    "bad words": {
        "temperature": 0.2,
        "bad_words_token_ids": [[5], [7, 8], [9, 9, 9]],
        "logit_bias": {7: 9, 8: 9, 9: 9},
    },
    "allowed": {"allowed_token_ids": [3, 14, 15, 92, 65]},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": [*range(60)]},
    "stop tokens": {"stop_token_ids": [*range(0, VOCAB_SIZE, 9)]},
    "stop string": {"stop": ["a", "Q", "\n", "~"]},
    "all": {
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {1: 2.0, 2: 2.5, 3: -1.0, 40: 3.0},
        "bad_words_token_ids": [[2, 1], [40, 40]],
        "allowed_token_ids": [*range(1, 100)],
        "min_tokens": 10,
        "stop_token_ids": [50],
        "logprobs": 3,
        "prompt_logprobs": 1,
    },
}


@dataclass(frozen=True)
class Request:
    name: str
    prompt: list[int]
    params: SamplingParams


def requests() -> list[Request]:
    """Fifty seeded ones; some prompts begin alike."""
    chance = random.Random(23)
    made = []
    for index in range(50):
        name = list(ASKED)[index % len(ASKED)]
        prompt = [*range(3, 40), *chance.choices(range(3, VOCAB_SIZE), k=chance.choice((1, 5, 27, 60)))]
        params = SamplingParams(max_tokens=NEW_TOKENS, seed=chance.getrandbits(64), **ASKED[name])
        made.append(Request(f"{index} {name}", prompt[chance.choice((0, 0, 36)) :], params))
    return made


REQUESTS = requests()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_models.save("gqa3-untied", path)
    tiny_models.save_tokenizer(path)
    return path


@dataclass
class Noting:
    """A sampler that keeps the logits of every row it has seen, by context and position."""

    sampler: PlanSampler
    logits: dict[tuple[str, int], npt.NDArray[np.float32]] = field(default_factory=dict)

    def sample(self, plan: Plan, logits: Logits) -> Samples:
        draws = [(row, at) for row in plan.drawn_rows for at in row.draws]
        for (row, at), values in zip(draws, logits.values, strict=False):  # behind a wrong guess: once more later
            self.logits[row.context.context_id, at + 1] = values.copy()
        before = logits.values.copy()
        samples = self.sampler.sample(plan, logits)
        assert np.array_equal(logits.values, before, equal_nan=True), "the sampler has changed the logits"
        return samples


def run(engine: TinyEngine, wanted: Iterable[Request], preempt: float = 0.0) -> dict[str, Generation]:
    """Add them at once and step to the end; before each step, running contexts are preempted with a probability."""
    return run_and_count(engine, wanted, preempt)[0]


def run_and_count(
    engine: TinyEngine, wanted: Iterable[Request], preempt: float = 0.0
) -> tuple[dict[str, Generation], int]:
    """As `run`, with the number of preemptions."""
    chance = random.Random(5)
    contexts = [engine.add(request.name, request.prompt, request.params) for request in wanted]
    while engine.has_work:
        for context in tuple(engine.scheduler.running):
            if chance.random() < preempt:
                engine.preempt(context.context_id)
        engine.step()
        engine.scheduler.check()
    done = {context.context_id: engine.forget(context.context_id) for context in contexts}
    engine.check_idle()
    return done, sum(context.num_preemptions for context in contexts)


def said(generation: Generation) -> tuple[Any, ...]:
    """All of an output that must not depend on how it was computed."""
    g = generation
    return g.token_ids, g.text, g.finish_reason, g.error, g.logprobs, g.prompt_logprobs


@pytest.fixture(scope="module")
def alone(directory: Path) -> dict[str, Generation]:
    """Each request's output when it has the engine to itself."""
    engine = tiny_models.engine(directory, num_blocks=8, num_speculative_tokens=0)
    return {request.name: run(engine, [request])[request.name] for request in REQUESTS}


def assert_same(done: dict[str, Generation], alone: dict[str, Generation]) -> None:
    for name, generation in done.items():
        assert said(generation) == said(alone[name]), name


def test_every_token_is_drawn_by_the_contract(directory: Path, alone: dict[str, Generation]) -> None:
    engine = tiny_models.engine(directory)
    assert isinstance(engine.sampler, PlanSampler)
    engine.sampler = noting = Noting(engine.sampler)
    # Of greedy contexts nobody sees all logits; who asks for log probabilities makes them be computed.
    seen = [r if not r.params.needs_only_largest else replace(r, params=with_logprobs(r.params)) for r in REQUESTS]
    assert seen != REQUESTS
    params = {r.name: engine.limits.effective(r.prompt, r.params) for r in seen}
    done = run(engine, seen)
    assert {name: g.token_ids for name, g in done.items()} == {name: g.token_ids for name, g in alone.items()}
    for request in seen:
        output = done[request.name].token_ids
        for count, token in enumerate(output):
            row = noting.logits[request.name, len(request.prompt) + count]
            asked = asked_of(params[request.name], request.prompt, output[:count], set(engine.spec.eos_token_ids))
            assert draw(row.tolist(), asked) == token, f"{request.name}: token {count}"
    plain = {r.name: draw_plainly(noting, r, done[r.name].token_ids) for r in REQUESTS if "greedy" not in r.name}
    changed = {name.split(" ", 1)[1] for name, tokens in plain.items() if tokens != done[name].token_ids}
    ways_to_end = {"min_tokens", "stop tokens", "stop string"}
    assert changed >= ASKED.keys() - ways_to_end - {"greedy", "greedy with filters"}, "a parameter had no effect"


def with_logprobs(params: SamplingParams) -> SamplingParams:
    return params.model_copy(update={"logprobs": 0})


def draw_plainly(noting: Noting, request: Request, output: Sequence[int]) -> list[int]:
    """What would have been drawn after each prefix of the output, had nothing been asked for."""
    rows = [noting.logits[request.name, len(request.prompt) + count].tolist() for count in range(len(output))]
    params = SamplingParams(seed=request.params.seed)
    return [draw(row, asked_of(params, request.prompt, output[:count], set())) for count, row in enumerate(rows)]


def test_shuffled_and_in_crowds(directory: Path, alone: dict[str, Generation]) -> None:
    for order, (seqs, budget) in enumerate(((64, 512), (5, 23), (2, 300))):
        shuffled = REQUESTS[:]
        random.Random(order).shuffle(shuffled)
        engine = tiny_models.engine(directory, max_num_seqs=seqs, max_num_batched_tokens=budget)
        assert_same(run(engine, shuffled), alone)


def test_neighbours_that_come_and_go(directory: Path, alone: dict[str, Generation]) -> None:
    """Strangers with other parameters join at every step and leave before their ends."""
    chance = random.Random(31)
    engine = tiny_models.engine(directory, max_num_seqs=24, max_num_batched_tokens=128)
    arrivals = REQUESTS[::2]
    done: dict[str, Generation] = {}
    while engine.has_work or arrivals:
        for request in arrivals[:2]:
            engine.add(request.name, request.prompt, request.params)
        del arrivals[:2]
        stranger = chance.choice(REQUESTS)
        name = f"stranger {len(engine.contexts)} {chance.random()}"
        if arrivals or len(done) < 20:
            engine.add(name, stranger.prompt[::-1], stranger.params)
        for part in engine.step().outputs:
            if part.finish_reason is not None:
                done[part.context_id] = engine.forget(part.context_id)
        for context_id in [context_id for context_id in engine.contexts if context_id.startswith("stranger")][:2]:
            if chance.random() < 0.5:
                engine.abort(context_id)
                engine.forget(context_id)
    engine.check_idle()
    mine = {name: generation for name, generation in done.items() if not name.startswith("stranger")}
    assert len(mine) == len(REQUESTS[::2])
    assert_same(mine, alone)


@pytest.mark.parametrize(("num_blocks", "preempt"), [(256, 0.2), (6, 0.0), (9, 0.1)])
def test_preempted(directory: Path, alone: dict[str, Generation], num_blocks: int, preempt: float) -> None:
    engine = tiny_models.engine(directory, num_blocks, max_num_seqs=12)
    # Short outputs, so that the forecast is too low and more is admitted than fits.
    engine.generate([[index] for index in range(100)], SamplingParams(max_tokens=1))
    done, preemptions = run_and_count(engine, REQUESTS[:36], preempt)
    assert preemptions > 0
    assert_same(done, alone)


def test_resumed_at_every_token(directory: Path, alone: dict[str, Generation]) -> None:
    """What a worker that takes over does: the tokens so far are given back, with their log probabilities."""
    engine = tiny_models.engine(directory)
    for request in REQUESTS[: len(ASKED)]:
        whole = alone[request.name]
        for cut in range(len(whole.token_ids) + 1):
            name = f"{request.name} {cut}"
            engine.add(
                name,
                request.prompt,
                request.params,
                output_token_ids=whole.token_ids[:cut],
                output_logprobs=whole.logprobs[:cut],
            )
    new: dict[str, int] = {}
    while engine.has_work:
        for part in engine.step().outputs:
            new[part.context_id] = new.get(part.context_id, 0) + len(part.new_token_ids)
    for name in tuple(engine.contexts):
        request_name, had = name.rsplit(" ", 1)
        assert said(engine.forget(name)) == said(alone[request_name]), name
        assert new[name] == len(alone[request_name].token_ids) - int(had), name
    engine.check_idle()


def test_a_bias_or_mask_ends_with_its_row(directory: Path) -> None:
    """One slot, taken by strongly bent rows and plain ones in turn."""
    plain = SamplingParams(seed=1, max_tokens=8)
    bent = SamplingParams(seed=1, max_tokens=8, logit_bias={5: 100}, allowed_token_ids=(5, 6), presence_penalty=2)
    (expected,) = tiny_models.engine(directory).generate([[9, 9, 9]], plain)
    engine = tiny_models.engine(directory, max_num_seqs=1)
    outputs = engine.generate([[9, 9, 9]] * 6, [bent, plain] * 3)
    assert [output.token_ids for output in outputs[1::2]] == [expected.token_ids] * 3
    assert {token for output in outputs[::2] for token in output.token_ids} <= {5, 6}


def test_greedy_whatever_the_filters(alone: dict[str, Generation], directory: Path) -> None:
    request = next(request for request in REQUESTS if request.name.endswith("greedy with filters"))
    plain = request.params.model_copy(update={"top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 3})
    (output,) = tiny_models.engine(directory).generate([request.prompt], plain)
    assert output.token_ids == alone[request.name].token_ids


def test_log_probabilities_are_those_of_transformers(directory: Path) -> None:
    """Raw ones, whatever is asked of the sampler; in any chunk, and preempted in between."""
    oracle = tiny_models.make("gqa3-untied")
    params = SamplingParams(temperature=3, repetition_penalty=2, seed=4, max_tokens=20, logprobs=4, prompt_logprobs=2)
    prompts = [random.Random(length).choices(range(VOCAB_SIZE), k=length) for length in (1, 2, 33, 150, 200)]
    seen = []
    for seqs, budget, preempt in ((8, 512, 0.0), (3, 7, 0.0), (8, 512, 0.15)):
        engine = tiny_models.engine(directory, max_num_seqs=seqs, max_num_batched_tokens=budget)
        wanted = [Request(str(index), prompt, params) for index, prompt in enumerate(prompts)]
        seen.append([said(g) for g in run(engine, wanted, preempt).values()])
    assert seen[0] == seen[1] == seen[2]
    for prompt, (output, _, _, _, logprobs, prompt_logprobs) in zip(prompts, seen[0], strict=True):
        entries = [*prompt_logprobs, *logprobs]
        assert entries[0] is None
        assert (len(prompt_logprobs), len(logprobs)) == (len(prompt), len(output))
        ids = torch.tensor([[*prompt, *output]])
        exact = oracle(ids).logits[0].detach().double().log_softmax(-1)
        for position, (entry, row) in enumerate(zip(entries[1:], exact, strict=False), 1):
            assert entry.token_id == ids[0, position]
            num_top = 2 if position < len(prompt) else 4
            assert [value for _, value in entry.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)
            for token, value in ((entry.token_id, entry.logprob), *entry.top):
                assert value == pytest.approx(float(row[token]), abs=1e-4)


def test_log_probabilities_of_a_prompt_of_8k_take_bounded_memory() -> None:
    vocabulary = Vocabulary([b"a"] * 8, frozenset())
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 2048}
    engine = scripted_engine.build({str(i): [1] * 9 for i in range(6)}, vocabulary, frozenset(), 600, 8200, settings)
    params = SamplingParams(max_tokens=9, prompt_logprobs=0)
    for index in range(6):
        engine.add(str(index), [index] * (8000 if index % 2 else 9), params if index else SamplingParams(max_tokens=9))
    while engine.has_work:
        engine.step()
    assert isinstance(engine.runner, scripted_engine.ScriptedRunner)
    assert engine.runner.most_logits <= MAX_PROMPT_LOGITS + 4 + engine.config.num_speculative_tokens
    for index in range(6):
        length = 8000 if index % 2 else 9
        expected = [None, *(TokenLogprobs(index, -float(at), 1, ()) for at in range(1, length))] if index else []
        assert engine.forget(str(index)).prompt_logprobs == expected
    engine.check_idle()


def test_log_probabilities_in_a_pool_that_is_too_small() -> None:
    """Computed again after a preemption, and never twice in the result; the model is the null one."""
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1, logprobs=2, prompt_logprobs=1)
    prompts = [[index + 1] * 20 for index in range(8)]
    calm = null_engine.build(num_blocks=400, max_num_seqs=8).generate(prompts, params)
    engine = null_engine.build(num_blocks=30, max_num_batched_tokens=16)
    outputs = engine.generate(prompts, params)
    assert [said(output) for output in outputs] == [said(output) for output in calm]
    assert all(len(output.prompt_logprobs) == 20 and len(output.logprobs) == 30 for output in outputs)
    engine.check_idle()


def test_packed_log_probabilities() -> None:
    entries = [TokenLogprobs(token, -token / 8, token + 1, ((3, -0.25), (token, -9999.0))) for token in range(5)]
    packed = pack(entries, 2)
    assert len(packed) == 5 * 28
    assert unpack(packed, 2) == entries
    assert unpack(packed[2 * 28 : 4 * 28], 2) == entries[2:4]
    assert unpack(b"", 20) == []


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"logit_bias": {"999999": 5}}, "logit_bias"),
        ({"allowed_token_ids": [1, VOCAB_SIZE]}, "allowed_token_ids"),
        ({"bad_words_token_ids": [[1], [2, VOCAB_SIZE]]}, "bad_words_token_ids"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"bad_words": ["a", "\0"]}, "bad_words_token_ids"),
    ],
)
def test_a_token_that_does_not_exist_is_refused_for_its_row(directory: Path, asked: dict[str, Any], param: str) -> None:
    engine = tiny_models.engine(directory)
    with pytest.raises(EngineError) as caught:
        engine.add("bad", [1, 2], SamplingParams(**asked))
    assert (caught.value.code, caught.value.param) == ("invalid_parameter", f"sampling.{param}")
    assert param in caught.value.message
    assert engine.generate([[1, 2]], SamplingParams(max_tokens=1))[0].error is None


def test_more_alternatives_than_tokens_are_refused() -> None:
    engine = scripted_engine.build({}, Vocabulary([b"a"] * 8, frozenset()), frozenset(), 4, 64, {})
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(EngineError, match=f"{name}: 9 is more than the vocabulary's 8"):
            engine.add("a", [1], SamplingParams.model_validate({name: 9}))


def test_a_row_without_a_token_to_draw_fails_alone(directory: Path) -> None:
    nothing = SamplingParams(allowed_token_ids=(4,), bad_words_token_ids=((4,),), max_tokens=4, seed=1, logprobs=1)
    good = SamplingParams(max_tokens=4, seed=1, logprobs=1)
    outputs = tiny_models.engine(directory).generate([[1, 2]] * 3, [good, nothing, good])
    assert outputs[1].error is not None
    assert outputs[1].error.code == "no_candidates"
    assert said(outputs[0]) == said(outputs[2])
    assert len(outputs[0].token_ids) == 4


def test_a_prompt_is_truncated_to_its_last_tokens(directory: Path) -> None:
    prompt = [*range(3, 90)]
    params = SamplingParams(max_tokens=6, seed=2, prompt_logprobs=0, echo=True)
    engine = tiny_models.engine(directory)
    (expected,) = engine.generate([prompt[-10:]], params)
    (output,) = engine.generate([prompt], params.model_copy(update={"truncate_prompt_tokens": 10}))
    assert said(output) == said(expected)
    assert len(output.prompt_logprobs) == 10
    (whole,) = engine.generate([prompt], params.model_copy(update={"truncate_prompt_tokens": 1000}))
    assert len(whole.prompt_logprobs) == 87


def test_bad_words_with_and_without_a_space() -> None:
    frontend = Frontend(smollm2_dir())
    sequences = bad_word_sequences([" dog", "unbelievable"], frontend)
    assert [frontend.tokenizer.encode(text) for text in ("dog", " dog")] == [list(s) for s in sequences[:2]]
    assert frontend.tokenizer.encode("unbelievable") == list(sequences[2])
    with pytest.raises(EngineError, match="' ' has no tokens") as caught:
        bad_word_sequences(["dog", " "], frontend)
    assert caught.value.param == "sampling.bad_words"


def test_bad_words_are_not_said(directory: Path) -> None:
    engine = tiny_models.engine(directory)
    plain = SamplingParams(temperature=0, max_tokens=12)
    (output,) = engine.generate([[9, 8, 7]], plain)
    pair = output.token_ids[3:5]
    (other,) = engine.generate([[9, 8, 7]], plain.model_copy(update={"bad_words_token_ids": (tuple(pair),)}))
    assert other.token_ids[:4] == output.token_ids[:4]
    assert all(other.token_ids[i : i + 2] != pair for i in range(12))
    words = [bytes(engine.vocabulary.token_bytes[token]) for token in output.token_ids]
    said = next(index for index, word in enumerate(words) if word.isascii())
    (third,) = engine.generate([[9, 8, 7]], plain.model_copy(update={"bad_words": (words[said].decode(),)}))
    assert output.token_ids[said] not in third.token_ids


def test_seeds_of_several_outputs() -> None:
    seeds = [child_seed(2**64 - 1, index) for index in range(100)]
    assert len(set(seeds)) == 100
    digest = hashlib.blake2b(b"\xff" * 8 + b"\x63" + bytes(7), digest_size=8).digest()
    assert seeds[99] == int.from_bytes(digest, "little")
