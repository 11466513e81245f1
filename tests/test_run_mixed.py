"""A file of every kind of row through `batonq run` and a real worker: calmly, and killed again and again.

The output must be the same, byte for byte once sorted, however often everything died on the way.
"""

from __future__ import annotations

import json
import random
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from batonq.engine.sampling_params import UNSUPPORTED_PARAMETERS
from tests.support import null_worker
from tests.support.running import NULL_WORKER_COMMAND, command, environment, read_rows, write_rows
from tests.support.servers import eventually

_KINDS = (
    "plain",
    "chat",
    "completion",
    "unicode",
    "stop strings",
    "penalties",
    "logprobs",
    "several choices",
    "bias and echo",
    "chat logprobs",
    "token ids",
    "malformed",
    "too long",
    "empty",
    "unsupported",
    "out of range",
)
_MODEL_LENGTH = 128
#: What makes a plain row one of these kinds.
_FIELDS: dict[str, dict[str, Any]] = {
    "unicode": {"prompt": "ď 🔥 ไทย"},
    "stop strings": {"stop": ["e", "a", "\n", "🔥"], "min_tokens": 2},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.25},
    "logprobs": {"logprobs": 2},
    "several choices": {"n": 3},
    "bias and echo": {"logit_bias": {"65": 5, "66": -100}, "bad_words": ["x"], "echo": True},
    "chat logprobs": {"logprobs": True, "top_logprobs": 2},
    "token ids": {"token_ids": [1, 2, 3]},
    "too long": {"prompt": "long " * _MODEL_LENGTH},
    "empty": {"prompt": ""},
    "unsupported": {"response_format": {"type": "json_object"}},
    "out of range": {"top_p": 1.5},
}
#: What becomes of the rows of a kind that has no output.
_ERRORS = {
    "malformed": "invalid_json",
    "too long": "context_length_exceeded",
    "empty": "invalid_parameter",
    "out of range": "invalid_parameter",
}


def expected_error(kind: str) -> str | None:
    if _FIELDS.get(kind, {}).keys() & UNSUPPORTED_PARAMETERS:
        return "unsupported_parameter"
    return _ERRORS.get(kind)


def mixed_row(kind: str, i: int) -> Any:
    """Row `i` of the file. Every one that runs is greedy or has a seed."""
    sampling: dict[str, Any] = {"temperature": 0} if i % 3 == 0 else {"temperature": 0.8, "top_p": 0.9, "seed": i}
    sampling["max_tokens"] = 5 + i % 20
    custom_id = f"{kind} ไทย {i}"
    if kind in ("chat", "completion", "chat logprobs"):
        chat = kind != "completion"
        asked = {"messages": [{"role": "user", "content": f"Say {i}."}]} if chat else {"prompt": f"Once {i}"}
        url = "/v1/chat/completions" if chat else "/v1/completions"
        body = asked | sampling | {"user": "u"} | _FIELDS.get(kind, {})
        return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    row = {"custom_id": custom_id, "prompt": f"row {i}"} | sampling
    if kind == "malformed":
        return json.dumps(row).encode()[:-9] + b"\n"
    if kind == "token ids":
        del row["prompt"]
    return row | _FIELDS.get(kind, {})


def mixed_file(path: Path, count: int) -> dict[str, tuple[int, str]]:
    """Write `count` rows with blank lines between some; for each custom_id its line number and kind."""
    lines: list[Any] = [b"\xef\xbb\xbf"]
    where = {}
    number = 1
    for i in range(count):
        kind = _KINDS[i % len(_KINDS)]
        row = mixed_row(kind, i)
        where[f"line-{number}" if kind == "malformed" else row["custom_id"]] = (number, kind)
        lines.append(row)
        number += 1
        if i % 10 == 0:
            lines.append(b"  \n")
            number += 1
    write_rows(path, lines)
    return where


def shown_as_asked(kind: str, body: dict[str, Any]) -> None:
    """Several choices and log probabilities are where OpenAI's clients look for them."""
    choices = body["choices"]
    assert [choice["index"] for choice in choices] == list(range(3 if kind == "several choices" else 1))
    count = body["usage"]["completion_tokens"]
    if kind == "chat logprobs":
        content = choices[0]["logprobs"]["content"]
        assert [len(token["top_logprobs"]) for token in content] == [2] * count
    elif kind == "logprobs":
        logprobs = choices[0]["logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == count
        assert all(name in top for name, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))
    else:
        assert all(choice["logprobs"] is None for choice in choices)


def start(source: Path, output: Path, *options: str, env: dict[str, str]) -> subprocess.Popen[str]:
    words = command(source, output, *options, own_worker=False)
    return subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True)


def finish(source: Path, output: Path, *options: str, env: dict[str, str]) -> tuple[int, str]:
    process = start(source, output, *options, env=env)
    _, shown = process.communicate(timeout=120)
    return process.returncode, shown


def lines(output: Path) -> list[bytes]:
    return output.read_bytes().splitlines(keepends=True) if output.exists() else []


def test_killed_at_20_random_times_it_ends_as_the_calm_run(tmp_path: Path) -> None:
    count, kills = 300, 20
    source = tmp_path / "in.jsonl"
    where = mixed_file(source, count)
    engine = {"max_model_len": _MODEL_LENGTH, "num_blocks": 400}
    env, slow = (
        environment(**{null_worker.ENVIRONMENT: json.dumps(engine | {"step_seconds": seconds})})
        for seconds in (0.0, 0.025)
    )
    options = ("--worker-command", NULL_WORKER_COMMAND, "--max-in-flight", "64")

    calm = tmp_path / "calm.jsonl"
    code, shown = finish(source, calm, *options, env=env)
    assert code == 3, shown
    rows = read_rows(calm)
    failed = [row for row in rows if row["error"] is not None]
    assert sorted(row["custom_id"] for row in rows) == sorted(where)
    assert f"{len(rows)} of {count} rows are finished, {len(failed)} of them errors" in shown
    for row in rows:
        line, kind = where[row["custom_id"]]
        assert (row["error"] or {}).get("code") == expected_error(kind), row
        assert row["error"] is None or row["error"]["line"] == line
        if row["error"] is None:
            shown_as_asked(kind, row["response"]["body"])

    output = tmp_path / "out.jsonl"
    draw = random.Random(20)
    progress = []
    for kill in range(kills):
        process = start(source, output, *options, env=slow)
        if kill % 2:  # at any moment of its start
            with suppress(subprocess.TimeoutExpired):
                process.wait(draw.uniform(0, 1.0))
        else:  # at any moment of its work
            target = len(lines(output)) + draw.randint(0, count // kills)
            eventually(lambda p=process, t=target: len(lines(output)) > t or p.poll() is not None, "rows")  # type: ignore[misc]
        process.kill()
        process.communicate()
        progress.append(len(lines(output)))
    assert len(set(progress)) > kills // 3, progress
    code, shown = finish(source, output, *options, env=env)
    assert code == 3, shown
    assert sorted(lines(output)) == sorted(lines(calm))

    code, shown = finish(source, output, *options, "--order", env=env)
    assert code == 3
    assert "this time 0 rows" in shown
    numbers = [where[row["custom_id"]][0] for row in read_rows(output)]
    assert numbers == sorted(numbers)


def test_smollm2_killed_twice(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"Write {i} words about the sea.", "max_tokens": 8 + i, "seed": i, "temperature": i % 2}
        for i in range(8)
    ]
    source = write_rows(tmp_path / "in.jsonl", rows)
    env = environment(GOMP_SPINCOUNT="1000")
    options = ("--model", "smollm2-135m", "--max-num-seqs", "2", "--num-threads", "1")
    calm, output = tmp_path / "calm.jsonl", tmp_path / "out.jsonl"
    code, shown = finish(source, calm, *options, env=env)
    assert code == 0, shown
    for target in (0, 3):
        process = start(source, output, *options, "--order", env=env)
        eventually(lambda t=target: len(lines(output)) > t, "rows")  # type: ignore[misc]
        process.kill()
        process.communicate()
    code, shown = finish(source, output, *options, "--order", env=env)
    assert code == 0, shown
    assert sorted(lines(output)) == sorted(lines(calm))
    assert [row["custom_id"] for row in read_rows(output)] == [f"line-{i + 1}" for i in range(8)]
