"""The wire contract: what makes a job, what is refused and how the refusal names the field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from batonq.engine.sampling_params import MAX_SEED, UNSUPPORTED_PARAMETERS, SamplingParams
from batonq.producer import serializer
from batonq.producer.schema import ErrorInfo, PromptJob, Result, error_from_validation, job_from_flat


def refusal(fields: dict[str, Any]) -> ErrorInfo:
    with pytest.raises(ValidationError) as caught:
        job_from_flat(fields)
    return error_from_validation(caught.value)


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
token_ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20)
messages = st.lists(st.fixed_dictionaries({"role": text, "content": text}), min_size=1, max_size=4)
inputs = st.one_of(
    st.fixed_dictionaries({"prompt": text}),
    st.fixed_dictionaries({"token_ids": token_ids}),
    st.fixed_dictionaries({"messages": messages}),
)
sampling = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 1e6) | st.none(),
        "top_p": st.floats(0, 1, exclude_min=True) | st.none(),
        "top_k": st.integers(-1, 10**6) | st.none(),
        "min_p": st.floats(0, 1) | st.none(),
        "max_tokens": st.integers(50, 10**6) | st.none(),
        "min_tokens": st.integers(0, 50) | st.none(),
        "stop": text | st.lists(text, max_size=4) | st.none(),
        "stop_token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=4) | st.none(),
        "ignore_eos": st.booleans() | st.none(),
        "seed": st.integers(0, MAX_SEED) | st.none(),
        "repetition_penalty": st.floats(1e-6, 1e6) | st.none(),
        "presence_penalty": st.floats(-2, 2) | st.none(),
        "frequency_penalty": st.floats(-2, 2) | st.none(),
        "logit_bias": st.dictionaries(st.integers(0, 2**31 - 1).map(str), st.floats(-100, 100), max_size=4) | st.none(),
        "bad_words": st.lists(text, max_size=4) | st.none(),
        "bad_words_token_ids": st.lists(token_ids, max_size=4) | st.none(),
        "allowed_token_ids": token_ids | st.none(),
        "prompt_logprobs": st.integers(0, 20) | st.booleans().filter(lambda given: not given) | st.none(),
        "include_stop_str_in_output": st.booleans() | st.none(),
        "skip_special_tokens": st.booleans() | st.none(),
        "truncate_prompt_tokens": st.integers(1, 10**6) | st.none(),
        "logprobs": st.integers(0, 20) | st.booleans() | st.none(),
    },
)
jobs = st.builds(lambda one, other: {**one, **other}, inputs, sampling)


@given(jobs)
def test_a_job_survives_the_wire(fields: dict[str, Any]) -> None:
    job = job_from_flat(fields)
    assert PromptJob.model_validate(serializer.loads(serializer.dumps(job.to_kwargs()))) == job


@given(jobs)
def test_null_means_default(fields: dict[str, Any]) -> None:
    without = {name: value for name, value in fields.items() if value is not None}
    assert job_from_flat(fields) == job_from_flat(without)


@pytest.mark.parametrize("name", ["n", "stream", "priority", "exact", "deadline", "metadata", "custom_id", "sampling"])
def test_null_means_default_in_a_job_too(name: str) -> None:
    assert PromptJob.model_validate({"prompt": "a", name: None}) == PromptJob(prompt="a")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", -0.5),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
        ("stop", [""]),
        ("stop_token_ids", [-1]),
        ("temperature", "hot"),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {"5": 100.5}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {"five": 1}),
        ("logit_bias", [5]),
        ("bad_words", [""]),
        ("bad_words_token_ids", [[]]),
        ("allowed_token_ids", []),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -1),
        ("echo", "perhaps"),
    ],
)
def test_a_value_out_of_range_names_its_field(name: str, value: Any) -> None:
    error = refusal({"prompt": "a", name: value})
    assert error.code == "invalid_parameter"
    assert error.param is not None
    assert error.param.split(".")[:2] == ["sampling", name]
    assert name in error.message


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_PARAMETERS))
def test_what_is_not_carried_out_is_refused_by_name(name: str) -> None:
    error = refusal({"prompt": "a", name: 1})
    assert (error.code, error.param) == ("unsupported_parameter", f"sampling.{name}")


@pytest.mark.parametrize(("name", "value"), [("n", 2), ("stream", True), ("priority", -1), ("deadline", 5)])
def test_what_a_job_carries_beside_its_prompt(name: str, value: Any) -> None:
    job = job_from_flat({"prompt": "a", name: value})
    assert getattr(PromptJob.model_validate(job.to_kwargs()), name) == value


@pytest.mark.parametrize("n", [0, 129])
def test_a_number_of_outputs_out_of_range(n: int) -> None:
    error = refusal({"prompt": "a", "n": n})
    assert (error.code, error.param) == ("invalid_parameter", "n")


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({"logprobs": True, "top_logprobs": 3}, 3),
        ({"logprobs": True}, 0),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": 5}, 5),
        ({"logprobs": 0}, 0),
    ],
)
def test_both_spellings_of_logprobs(fields: dict[str, Any], logprobs: int | None) -> None:
    assert job_from_flat({"prompt": "a"} | fields).sampling.logprobs == logprobs


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": "a", "echo": True, "logprobs": 1}, "unsupported_parameter", "sampling.echo"),
        (
            {"messages": [{"role": "user", "content": "a"}], "echo": True},
            "unsupported_parameter",
            "sampling.echo",
        ),
        ({"prompt": "a", "top_logprobs": 1}, "invalid_parameter", "sampling"),
    ],
)
def test_what_does_not_go_together(fields: dict[str, Any], code: str, param: str) -> None:
    error = refusal(fields)
    assert (error.code, error.param) == (code, param)


def test_an_unknown_parameter() -> None:
    assert refusal({"prompt": "a", "temprature": 1}).code == "unknown_parameter"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": ""},
        {"messages": []},
        {"token_ids": []},
        {"prompt": "a", "messages": [{"role": "u", "content": "b"}]},
    ],
)
def test_exactly_one_input(fields: dict[str, Any]) -> None:
    assert refusal(fields).code == "invalid_parameter"


def test_text_parts_are_joined_and_others_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    job = job_from_flat({"messages": [{"role": "user", "content": parts}]})
    assert job.messages is not None
    assert job.messages[0].content == "ab"
    error = refusal({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
    assert error.param == "messages.0.content"


@pytest.mark.parametrize("bad", ["", "a b", "a:b", "x" * 129, "ä"])
def test_ids_are_safe_in_a_key(bad: str) -> None:
    assert refusal({"prompt": "a", "id": bad}).param == "id"
    assert refusal({"prompt": "a", "client_id": bad}).param == "client_id"


def test_a_long_value_is_shown_in_part() -> None:
    assert len(refusal({"prompt": "a", "temperature": "x" * 10_000}).message) < 300


def test_a_result_survives_the_wire() -> None:
    result = Result(id="a", model="m", effective=SamplingParams(seed=3), error=ErrorInfo(code="c", message="m"))
    assert Result.model_validate(serializer.loads(serializer.dumps(result.model_dump(mode="json")))) == result


def test_a_pickle_is_no_payload() -> None:
    with pytest.raises(ValueError, match=r"npack|extra"):
        serializer.loads(b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07builtins\x94.")
