"""From lines to jobs: both forms of row, and every way in which a line can be wrong."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batonq.producer import serializer
from batonq.producer.rows import Line, Row, job_id, parse_row, read_lines
from batonq.producer.schema import PromptJob


def parse(fields: Any, number: int = 1) -> Row:
    data = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return parse_row(Line(number, 0, len(data), data))


def job(fields: Any) -> PromptJob:
    row = parse(fields)
    assert row.error is None
    assert row.job is not None
    return row.job


def chat(**changes: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    fields = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return {name: value for name, value in (fields | changes).items() if value is not ...}


def body(**changes: Any) -> dict[str, Any]:
    return chat(body=chat()["body"] | changes)


def test_a_chat_line() -> None:
    row = parse(chat())
    assert row.custom_id == "a"
    assert row.chat
    assert job(chat()).sampling.max_tokens == 5


def test_a_completion_line() -> None:
    fields = chat(url="/v1/completions", body={"model": "m", "prompt": "hi", "stop": "x"})
    assert job(fields) == PromptJob.model_validate({"model": "m", "prompt": "hi", "sampling": {"stop": ["x"]}})
    assert not parse(fields).chat


@pytest.mark.parametrize("name", ["prompt", "messages", "token_ids"])
def test_a_plain_row(name: str) -> None:
    value = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "token_ids": [1, 2]}[name]
    parsed = job({name: value, "max_tokens": 7, "temperature": 0, "seed": 2**64 - 1})
    assert (parsed.sampling.max_tokens, parsed.sampling.greedy, parsed.sampling.seed) == (7, True, 2**64 - 1)
    assert getattr(parsed, name) is not None


def test_other_spellings() -> None:
    assert job(body(max_tokens=None, max_completion_tokens=9)).sampling.max_tokens == 9
    assert job(chat(url="/v1/completions", body={"prompt": [1, 2]})).token_ids == (1, 2)
    assert job({"prompt": ["one"]}).prompt == "one"


def test_values_that_ask_for_nothing_are_accepted() -> None:
    idle = {"n": 1, "stream": False, "logprobs": False, "frequency_penalty": 0, "presence_penalty": 0.0, "user": "u"}
    assert job(body(**idle, tools=[], logit_bias={}, top_logprobs=None)) == job(chat())


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        (chat(method=...), "invalid_parameter", "method"),
        (chat(method="GET"), "invalid_parameter", "method"),
        (chat(url="/v1/embeddings"), "invalid_parameter", "url"),
        (chat(url=["/v1/completions"]), "invalid_parameter", "url"),
        (chat(body=...), "invalid_parameter", "body"),
        (chat(body="x"), "invalid_parameter", "body"),
        (chat(extra=1), "unknown_parameter", "extra"),
        (chat(url="/v1/completions"), "invalid_parameter", "prompt"),
        (chat(body={"prompt": "x"}), "invalid_parameter", "messages"),
        (body(stream=True), "unsupported_parameter", "stream"),
        (body(n=0), "invalid_parameter", "n"),
        (body(response_format={}), "unsupported_parameter", "response_format"),
        (body(echo=True), "unsupported_parameter", "echo"),
        (body(logprobs=21), "invalid_parameter", "logprobs"),
        (body(top_logprobs=2), "invalid_parameter", "top_logprobs"),
        (body(frequency_penalty=2.5), "invalid_parameter", "frequency_penalty"),
        (body(logit_bias={"9": 101}), "invalid_parameter", "logit_bias.9"),
        (body(max_completion_tokens=6), "invalid_parameter", "max_completion_tokens"),
        (body(temprature=1), "unknown_parameter", "temprature"),
        (body(id="x"), "unknown_parameter", "id"),
        (body(top_p=0), "invalid_parameter", "top_p"),
        (body(seed=2**64), "invalid_parameter", "seed"),
        (body(seed=10**30), "invalid_parameter", "seed"),
        (body(min_tokens=9), "invalid_parameter", "min_tokens"),
        (body(messages=[{"role": "user", "content": 5}]), "invalid_parameter", "messages.0.content"),
        (body(metadata={"big": 2**70}), "invalid_parameter", None),
        ({"prompt": "\ud800"}, "invalid_parameter", None),
        ({"prompt": "a", "\ud800": 1}, "unknown_parameter", "\\ud800"),
        ({"prompt": "a", "custom_id": 5}, "invalid_parameter", "custom_id"),
        ({"prompt": "a", "custom_id": "\udfff"}, "invalid_parameter", "custom_id"),
        ({"prompt": ["a", "b"]}, "unsupported_parameter", "prompt"),
        ({"prompt": []}, "unsupported_parameter", "prompt"),
        ({"prompt": "a", "client_id": "x"}, "unknown_parameter", "client_id"),
        ({}, "invalid_parameter", None),
        ([], "invalid_json", None),
        (b"{", "invalid_json", None),
        (b'{"prompt": "\xff"}', "invalid_json", None),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_json", None),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "invalid_json", None),
        (b'{"prompt": ' + b"[" * 100_000, "invalid_json", None),
    ],
)
def test_a_bad_row(fields: Any, code: str, param: str | None) -> None:
    row = parse(fields, number=17)
    assert row.error is not None
    assert (row.error.code, row.error.param) == (code, param)
    assert "sampling" not in row.error.message
    row.error.model_dump_json()  # can be written


def test_rows_without_an_id_are_named_after_their_line() -> None:
    assert parse({"prompt": "a"}, number=12).custom_id == "line-12"
    assert parse(b"nonsense", number=12).custom_id == "line-12"
    assert parse({"custom_id": "mine"}).custom_id == "mine"  # known even though the row is bad


def test_blank_lines_keep_their_numbers_and_a_bom_is_stripped_once() -> None:
    data = b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \n{"prompt": "b"}'
    lines = list(read_lines(io.BytesIO(data)))
    assert [line.number for line in lines] == [1, 4]
    assert [data[line.offset : line.offset + line.length] for line in lines] == [line.data for line in lines]
    assert [job(line.data).prompt for line in lines] == ["a", "b"]
    row = parse(next(read_lines(io.BytesIO(b"\xef\xbb\xbf" + data))).data)
    assert row.error is not None


@pytest.mark.parametrize("end", [b"", b"\n", b'\n{"prompt": "b"}\n'])
def test_a_line_that_is_too_long_is_measured_and_not_kept(end: bytes) -> None:
    exact, longer = b"x" * 10, b"x" * 11
    lines = list(read_lines(io.BytesIO(exact + b"\n" + longer + end), limit=10))
    assert lines[0].data == exact + b"\n"
    assert lines[1].data == b""
    error = parse_row(lines[1], limit=10).error
    assert error is not None
    assert error.code == "line_too_long"
    assert "11" in error.message or "12" in error.message
    assert "10" in error.message
    assert len(lines) == (3 if end.count(b"\n") == 2 else 2)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)
names = st.sampled_from(
    [
        "custom_id",
        "method",
        "url",
        "body",
        "prompt",
        "messages",
        "token_ids",
        "max_tokens",
        "stop",
        "seed",
        "metadata",
        "x",
    ]
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a machine that is busy elsewhere
@given(st.dictionaries(names, json_values, max_size=6) | st.binary(min_size=1))
def test_no_line_is_beyond_parsing(fields: Any) -> None:
    row = parse(fields)
    assert (row.job is None) != (row.error is None)
    if row.job is not None:
        assert PromptJob.model_validate(serializer.loads(serializer.dumps(row.job.to_kwargs()))) == row.job
    if row.error is not None:
        row.error.model_dump_json()
    row.custom_id.encode()


def test_a_jobs_id_depends_on_run_line_and_content() -> None:
    ids = {
        job_id(run_id, parse(fields, number))
        for run_id in ("a", "b")
        for fields in ({"prompt": "x"}, {"prompt": "y"}, {"prompt": "x", "seed": 1})
        for number in (1, 2)
    }
    assert len(ids) == 12
    assert job_id("a", parse({"prompt": "x"})) == job_id("a", parse({"max_tokens": None, "prompt": "x"}))
