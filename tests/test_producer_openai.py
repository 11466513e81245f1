"""Results in OpenAI's form: several choices, log probabilities of both kinds, and nothing that differs between runs."""

from __future__ import annotations

from typing import Any

from batonq.engine.sampling_params import SamplingParams
from batonq.producer.openai import completion
from batonq.producer.schema import Choice, Result, Timings, TokenLogprob, TopLogprob, Usage


def token(data: bytes, logprob: float, *tops: tuple[bytes, float]) -> TokenLogprob:
    def fields(data: bytes, logprob: float) -> dict[str, Any]:
        return {"token": data.decode(errors="replace"), "token_id": 7, "bytes": list(data), "logprob": logprob}

    return TokenLogprob(**fields(data, logprob), rank=1, top_logprobs=[TopLogprob(**fields(*top)) for top in tops])


def result(**fields: Any) -> Result:
    sampling = SamplingParams(seed=5, max_tokens=3, temperature=fields.pop("temperature", 0.5))
    return Result(id="run-abc", model="m", seed=5, effective=sampling, numerics=["x"], **fields)


def choice(index: int, **fields: Any) -> Choice:
    return Choice(index=index, text=f"text {index}", token_ids=[1], finish_reason="stop", **fields)


def test_several_choices() -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=1, total_tokens=3)
    body = completion(result(choices=[choice(0), choice(1)], usage=usage), "abc", chat=True)
    assert [c["index"] for c in body["choices"]] == [0, 1]
    assert [c["message"]["content"] for c in body["choices"]] == ["text 0", "text 1"]
    assert body["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    assert body["batonq"]["sampling"] == {"max_tokens": 3, "temperature": 0.5}
    assert body["batonq"]["seed"] == 5


def test_it_says_nothing_that_differs_from_run_to_run() -> None:
    def body(cached: int, finished: float, owners: list[str], seed: int) -> dict[str, Any]:
        usage = Usage(prompt_tokens=9, completion_tokens=2, cached_tokens=cached, total_tokens=11)
        timings = Timings(finished=finished)
        made = result(choices=[choice(0)], usage=usage, timings=timings, owners=owners, resumes=len(owners) - 1)
        greedy = made.model_copy(update={"effective": SamplingParams(temperature=0, seed=seed), "seed": seed})
        return completion(greedy, "abc", chat=False)

    assert body(0, 1.0, ["a"], 1) == body(8, 2.0, ["a", "b"], 2)


def test_log_probabilities_of_a_chat() -> None:
    logprobs = [token(b"a", -0.5, (b"a", -0.5), (b"b", -1.5))]
    body = completion(result(choices=[choice(0, logprobs=logprobs)]), "abc", chat=True)
    a, b = ({"token": t, "logprob": p, "bytes": [ord(t)]} for t, p in (("a", -0.5), ("b", -1.5)))
    assert body["choices"][0]["logprobs"] == {"content": [a | {"top_logprobs": [a, b]}], "refusal": None}


def test_log_probabilities_of_a_completion() -> None:
    fire = "🔥".encode()
    logprobs = [
        token(b"ab", -0.5, (b"x", -0.25)),
        token(fire[:2], -1.0, (fire[:2], -1.0)),
        token(fire[2:], -2.0, (b"y", -0.1)),
        token(b"c", -3.0, (b"z", -0.1)),
    ]
    form = completion(result(choices=[choice(0, logprobs=logprobs)]), "abc", chat=False)["choices"][0]["logprobs"]
    assert form["text_offset"] == [0, 2, 3, 3]
    assert form["token_logprobs"] == [-0.5, -1.0, -2.0, -3.0]
    assert form["tokens"] == ["ab", r"bytes:\xf0\x9f", r"bytes:\x94\xa5", "c"]
    assert form["top_logprobs"][0] == {"x": -0.25, "ab": -0.5}
    plain = completion(result(choices=[choice(0, logprobs=[token(b"a", -1.0)])]), "abc", chat=False)
    assert plain["choices"][0]["logprobs"]["top_logprobs"] is None


def test_log_probabilities_of_a_prompt() -> None:
    body = completion(result(choices=[choice(0)], prompt_logprobs=[None, token(b"a", -1.0)]), "abc", chat=False)
    assert body["prompt_logprobs"][0] is None
    assert body["prompt_logprobs"][1]["logprob"] == -1.0
    assert "prompt_logprobs" not in completion(result(choices=[choice(0)]), "abc", chat=False)
