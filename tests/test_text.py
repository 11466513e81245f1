"""Text of outputs: streamed deltas, the final text and the ids decoded at once are the same; stops are found at once.

Outputs are scripted over SmolLM2's vocabulary. The oracle of where they end takes bytes one at a time; ids are decoded
by the tokenizer's own library.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import tokenizers

from batonq.engine.context import Context, FinishReason
from batonq.engine.loading import Frontend
from batonq.engine.sampling_params import SamplingParams
from batonq.engine.text import TextState, Vocabulary
from tests.support import scripted_engine
from tests.support.models import smollm2_dir

EOS = 2
MULTIBYTE = "ď 🔥 ไทย, naïve café — 漢字かな交じり文 🇨🇭👩‍👩‍👧‍👦 ЖЙЦ ∮E⋅da = Q"


@pytest.fixture(scope="module")
def frontend() -> Frontend:
    return Frontend(smollm2_dir())


@pytest.fixture(scope="module")
def library() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(smollm2_dir() / "tokenizer.json"))


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    script: list[int]
    params: SamplingParams


def make_case(chance: random.Random, frontend: Frontend) -> Case:
    """A prompt, an output rich in broken characters, and stop strings most of which are in it, across tokens."""
    length = chance.randint(1, 40)
    source = frontend.tokenizer.encode("".join(chance.choices(MULTIBYTE, k=length)))[:length]
    script = [
        chance.choice((token, token, chance.randrange(3, 49152), chance.randrange(0, 300))) for token in source
    ] or [5]
    text = b"".join(frontend.tokenizer.token_bytes[token] for token in script).decode(errors="ignore")
    stops = []
    for _ in range(chance.choice((0, 1, 1, 2, 4))):
        at = chance.randrange(max(1, len(text)))
        stop = text[at : at + chance.randint(1, 6)]
        stops.append((stop or "x") + chance.choice(("", "", "#")))  # with the last, a near miss
    params = SamplingParams(
        stop=tuple(stops),
        max_tokens=len(script),
        min_tokens=chance.choice((0, 0, chance.randint(0, len(script)))),
        include_stop_str_in_output=chance.random() < 0.3,
        skip_special_tokens=chance.random() < 0.6,
        echo=chance.random() < 0.2,
        stop_token_ids=(chance.choice(script),) if chance.random() < 0.1 else (),
        ignore_eos=chance.random() < 0.5,
    )
    return Case(frontend.tokenizer.encode(MULTIBYTE)[: chance.randint(1, 30)], script, params)


def ending_of(case: Case, vocabulary: Vocabulary) -> tuple[int, bytes, FinishReason]:
    """How many tokens the output has, its bytes, and why it ends: by definition."""
    params = case.params
    hidden = vocabulary.special_token_ids if params.skip_special_tokens else frozenset[int]()
    shown = {token: b"" if token in hidden else vocabulary.token_bytes[token] for token in (*case.prompt, *case.script)}
    text = b"".join(shown[token] for token in case.prompt) if params.echo else b""
    echoed = len(text)
    for count, token in enumerate(case.script, 1):
        last = token in params.stop_token_ids or (token == EOS and not params.ignore_eos)
        if last and not params.include_stop_str_in_output:
            return count, text, FinishReason.STOP
        for byte in shown[token]:
            text += bytes([byte])
            ends = [stop for stop in map(str.encode, params.stop) if text[echoed:].endswith(stop)]
            if ends and count >= params.min_tokens:
                cut = 0 if params.include_stop_str_in_output else len(max(ends, key=len))
                return count, text[: len(text) - cut], FinishReason.STOP
        if last:
            return count, text, FinishReason.STOP
    return len(case.script), text, FinishReason.LENGTH


def test_500_outputs_streamed_and_whole(frontend: Frontend, library: tokenizers.Tokenizer) -> None:
    chance = random.Random(17)
    cases = {str(index): make_case(chance, frontend) for index in range(500)}
    scripts = {name: case.script for name, case in cases.items()}
    engine = scripted_engine.build(
        scripts, frontend.vocabulary, frozenset({EOS}), 30, 80, {"max_num_seqs": 32, "max_num_batched_tokens": 64}
    )
    contexts = {name: engine.add(name, case.prompt, case.params) for name, case in cases.items()}
    deltas: dict[str, list[str]] = {name: [] for name in cases}
    stopped_inside = decoded = 0
    while engine.has_work:
        engine.preempt(chance.choice(tuple(cases)))
        for part in engine.step().outputs:
            context = contexts[part.context_id]
            ended = part.finish_reason is not None
            if ended or chance.random() < 0.8:  # a stream may skip a step
                deltas[part.context_id].append(context.text.delta(final=ended))
            if not ended and chance.random() < 0.05:
                deltas[part.context_id].append(context.text.delta(final=False))
                taken_over = rebuilt(context, cases[part.context_id], frontend.vocabulary)
                assert taken_over == "".join(deltas[part.context_id])
    for name, case in cases.items():
        count, text, reason = ending_of(case, frontend.vocabulary)
        generation = engine.forget(name)
        final = text.decode(errors="replace")
        assert (generation.token_ids, generation.text) == (case.script[:count], final), case
        assert generation.finish_reason is reason, case
        shown = ""
        for delta in deltas[name]:
            shown += delta
            assert final.startswith(shown), "held-back text was shown"
        assert shown == final
        if reason is FinishReason.LENGTH and not case.params.echo:
            assert final == library.decode(case.script, skip_special_tokens=case.params.skip_special_tokens)
            decoded += 1
        stopped_inside += reason is FinishReason.STOP and count < len(case.script)
    engine.check_idle()
    assert stopped_inside > 100
    assert decoded > 100
    assert sum(context.num_preemptions for context in contexts.values()) > 0


def rebuilt(context: Context, case: Case, vocabulary: Vocabulary) -> str:
    """What a worker that takes over would have shown so far."""
    params = case.params
    text = TextState(
        vocabulary,
        params.stop,
        include_stop=params.include_stop_str_in_output,
        skip_special=params.skip_special_tokens,
        echo=case.prompt if params.echo else (),
    )
    for count, token in enumerate(context.output_token_ids, 1):
        text.push(token, may_stop=count >= params.min_tokens)
    return text.delta(final=False)


def stream(pieces: Sequence[bytes], stops: Sequence[str], *, include_stop: bool = False) -> tuple[list[str], str]:
    """Deltas and text of tokens that are these pieces."""
    text = TextState(Vocabulary(pieces, frozenset()), stops, include_stop=include_stop)
    deltas = []
    for token in range(len(pieces)):
        stopped = text.push(token)
        deltas.append(text.delta(final=stopped or token == len(pieces) - 1))
        if stopped:
            break
    return deltas, text.value


@pytest.mark.parametrize(
    ("pieces", "stops", "deltas"),
    [
        ([b"abc ", b"DEF", b"g"], ["DE"], ["abc ", ""]),
        ([b"abD", b"E", b"F", b"g"], ["DEF"], ["ab", "", ""]),
        ([b"abD", b"E", b"G"], ["DEF"], ["ab", "", "DEG"]),
        ([b"aab", b"aac"], ["aabaac", "c"], ["", ""]),
        ([b"x", b"yz"], ["yz", "xy"], ["", ""]),
        ([b"\xf0\x9f", b"\x94", b"\xa5!"], [], ["", "", "🔥!"]),
        ([b"\xf0\x9f", b"a"], [], ["", "�a"]),
        ([b"\xe0\xb9", b"\x84\xe0\xb8\x97"], ["ท"], ["", "ไ"]),
    ],
)
def test_pieces(pieces: list[bytes], stops: list[str], deltas: list[str]) -> None:
    assert stream(pieces, stops) == (deltas, "".join(deltas))


def test_a_stop_that_is_left_in_the_text() -> None:
    assert stream([b"abD", b"EFg"], ["DEF"], include_stop=True) == (["ab", "DEF"], "abDEF")


def test_characters_byte_by_byte() -> None:
    said = "ď 🔥 ไทย"
    deltas, text = stream([bytes([value]) for value in said.encode()], ["#"])
    assert text == "".join(deltas) == said
    assert "�" not in "".join(deltas)


def test_an_echo_loses_the_space_that_a_tokenizer_put_before_it() -> None:
    vocabulary = Vocabulary([b" the", b" dog", b"<s>"], frozenset({2}), strip_leading_space=True)
    text = TextState(vocabulary, ["dog"], echo=(2, 0, 1))
    assert text.delta(final=False) == "the dog"
    assert not text.push(0)
    assert text.push(1)
    assert text.delta(final=True) == " the "
    assert text.value == "the dog the "
