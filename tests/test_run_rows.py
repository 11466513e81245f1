"""`batonq run` from input to output: forms of rows, bad rows, duplicates, options, and what a rerun does."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from batonq.producer import keys
from batonq.producer.client import connect
from batonq.producer.embedded import EmbeddedServer
from tests.support.answering import answer
from tests.support.running import (
    ANSWERING,
    answered,
    command,
    environment,
    jobs_in_redis,
    leftovers,
    prompts,
    read_rows,
    run,
    state_directory,
    texts,
    write_rows,
)
from tests.support.servers import eventually, server


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


Files = tuple[Path, Path]


def test_every_form_of_row(files: Files) -> None:
    body = {"messages": [{"role": "user", "content": "ď 🔥 ไทย"}], "max_tokens": 5}
    rows = [
        b"\xef\xbb\xbf",
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": body},
        b"\n  \n",
        {"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "model": "gpt"}},
        {"prompt": "x" * 70_000},
        {"custom_id": "ünï", "token_ids": [1, 2]},
    ]
    done = run(write_rows(files[0], rows), files[1])
    assert done.returncode == 0, done.stderr
    assert "4 of 4 rows are finished, 0 of them errors" in done.stderr
    assert done.stderr.count("asks for model gpt") == 1
    assert texts(files[1]) == sorted(
        [
            ("chat", answer("ď 🔥 ไทย")),
            ("text", answer("a")),
            ("line-5", answer("x" * 70_000)),
            ("ünï", answer("1 2")),
        ]
    )
    row = next(row for row in read_rows(files[1]) if row["custom_id"] == "chat")
    assert row["response"]["status_code"] == 200
    assert row["response"]["request_id"]
    body = row["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    assert body["batonq"]["sampling"] == {"max_tokens": 5}
    assert leftovers(files[1]) == []
    assert jobs_in_redis(files[1]) == []


def bad_rows() -> list[Any]:
    return [
        {"custom_id": "good", "prompt": "a"},
        b"nonsense\n",
        {"custom_id": "stream", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "stream": True}},
        b'{"prompt": "' + b"x" * 11_000_000 + b'"}\n',
        {"custom_id": "too long", "prompt": "fail: a"},
        {"custom_id": "foreign", "prompt": "foreign: a"},
        {"custom_id": "last", "prompt": "b"},
    ]


def test_bad_rows_get_error_rows_and_the_rest_runs(files: Files) -> None:
    done = run(write_rows(files[0], bad_rows()), files[1])
    assert done.returncode == 3, done.stderr
    assert "7 of 7 rows are finished, 5 of them errors" in done.stderr
    assert texts(files[1]) == sorted(
        [
            ("good", answer("a")),
            ("line-2", "invalid_json"),
            ("stream", "unsupported_parameter"),
            ("line-4", "line_too_long"),
            ("too long", "context_length_exceeded"),
            ("foreign", "job_failed"),
            ("last", answer("b")),
        ]
    )
    errors = {row["custom_id"]: row["error"] for row in read_rows(files[1])}
    assert errors["line-4"]["line"] == 4
    assert "11000015 bytes" in errors["line-4"]["message"]
    assert errors["stream"]["param"] == "stream"

    again = run(files[0], files[1])
    assert again.returncode == 3
    assert "this time 0 rows" in again.stderr

    retried = run(files[0], files[1], "--retry-errors")
    assert retried.returncode == 3
    assert "this time 5 rows" in retried.stderr
    assert len(texts(files[1])) == 7
    assert sorted(answered(files[1])) == ["foreign", "foreign", "good", "last", "too long", "too long"]


def test_errors_in_a_file_of_their_own(files: Files, tmp_path: Path) -> None:
    errors = tmp_path / "errors.jsonl"
    assert run(write_rows(files[0], bad_rows()), files[1], "--error-file", str(errors)).returncode == 3
    assert [custom_id for custom_id, _ in texts(files[1])] == ["good", "last"]
    assert len(texts(errors)) == 5
    again = run(files[0], files[1], "--error-file", str(errors))
    assert again.returncode == 3
    assert "this time 0 rows" in again.stderr


def test_bad_rows_can_stop_a_run_before_any_work(files: Files) -> None:
    done = run(write_rows(files[0], bad_rows()), files[1], "--on-error", "fail")
    assert done.returncode == 1
    assert "line 2: invalid_json" in done.stderr
    assert "line 3: unsupported_parameter" in done.stderr
    assert "line 4: line_too_long" in done.stderr
    assert not files[1].exists()
    assert not (state_directory(files[1]) / "valkey").exists()


def test_duplicates(files: Files) -> None:
    rows = [*prompts(2), {"custom_id": "row 0", "prompt": "other"}]
    write_rows(files[0], rows)
    for _ in range(2):  # the second time from the index
        done = run(*files)
        assert done.returncode == 1
        assert "duplicate_custom_id: custom_id 'row 0' of line 3 is that of line 1 already" in done.stderr
        assert not files[1].exists()
    expected = [
        ("row 0", "duplicate_custom_id"),
        ("row 0", answer("prompt number 0")),
        ("row 1", answer("prompt number 1")),
    ]
    for _ in range(2):
        assert run(*files, "--on-duplicate", "error").returncode == 3
        assert texts(files[1]) == sorted(expected)


def test_same_file_for_input_and_output(files: Files, tmp_path: Path) -> None:
    write_rows(files[0], prompts(1))
    (tmp_path / "hard").hardlink_to(files[0])
    (tmp_path / "soft").symlink_to(files[0])
    content = files[0].read_bytes()
    for output in (files[0], tmp_path / "hard", tmp_path / "soft"):
        done = run(files[0], output, "--overwrite")
        assert done.returncode == 1
        assert "same file" in done.stderr
        assert files[0].read_bytes() == content
    done = run(*files, "--error-file", str(files[1]))
    assert done.returncode == 1
    assert "output and error file are the same file" in done.stderr


def test_limit_then_all(files: Files) -> None:
    write_rows(files[0], prompts(20))
    assert run(*files, "--limit", "5").returncode == 0
    assert len(read_rows(files[1])) == 5
    assert run(*files).returncode == 0
    assert sorted(answered(files[1])) == sorted(row["custom_id"] for row in prompts(20))


def test_overwrite_starts_afresh(files: Files) -> None:
    write_rows(files[0], prompts(3))
    assert run(*files).returncode == 0
    files[1].write_bytes(b"nonsense\n")
    refused = run(*files)
    assert refused.returncode == 1
    assert "line 1, is no output row" in refused.stderr
    bad = write_rows(files[0].with_name("bad.jsonl"), [b"nonsense\n"])
    assert run(bad, files[1], "--overwrite", "--on-error", "fail").returncode == 1
    assert files[1].read_bytes() == b"nonsense\n"  # nothing is lost before the input is known to be good
    other_model = run(*files, "--overwrite", "--served-model-name", "other")
    assert other_model.returncode == 0
    assert {row["response"]["body"]["model"] for row in read_rows(files[1])} == {"other"}
    assert run(*files).returncode == 1  # it is a run of the other model now


def test_an_empty_input_makes_an_empty_output(files: Files) -> None:
    done = run(write_rows(files[0], [b"\n"]), files[1])
    assert done.returncode == 0
    assert "0 of 0 rows" in done.stderr
    assert files[1].read_bytes() == b""


def test_rows_removed_from_the_output_run_again(files: Files) -> None:
    write_rows(files[0], prompts(5))
    assert run(*files).returncode == 0
    complete = texts(files[1])
    lines = files[1].read_bytes().splitlines(keepends=True)
    files[1].write_bytes(b"".join(lines[:2]) + lines[3][:-9])
    assert run(*files).returncode == 0
    assert texts(files[1]) == complete


def test_more_rows_than_may_be_under_way(files: Files) -> None:
    write_rows(files[0], prompts(50))
    assert run(*files, "--max-in-flight", "3").returncode == 0
    assert len({custom_id for custom_id, _ in texts(files[1])}) == 50


def test_with_a_fleet(files: Files, tmp_path: Path) -> None:
    write_rows(files[0], prompts(300))
    with server(tmp_path / "fleet") as running, connect(running.url) as connection:
        worker_command = [
            sys.executable,
            ANSWERING,
            "--redis-url",
            running.url,
            "--model",
            "m",
            "--served-model-name",
            "tiny",
        ]
        worker = subprocess.Popen(worker_command)
        try:
            done = run(*files, own_worker=False, env=environment(REDIS_URL=running.url))
        finally:
            worker.terminate()
            worker.wait(30)
        assert done.returncode == 0, done.stderr
        assert len(texts(files[1])) == 300
        left = {key.decode() for key in connection.scan_iter()}
        assert left == {"rq:queues", "answered", *(key for key in left if key.startswith("rq:worker:"))}
    assert not (state_directory(files[1]) / "valkey").exists()


def test_options_of_an_own_worker_are_refused_with_a_fleet(files: Files) -> None:
    write_rows(files[0], prompts(1))
    done = run(*files, "--redis-url", "unix:///x", "--num-threads", "1", own_worker=False)
    assert done.returncode == 1
    assert "fleet" in done.stderr


def test_a_fleet_that_cannot_be_reached(files: Files) -> None:
    write_rows(files[0], prompts(1))
    done = run(*files, "--redis-url", "unix:///nonexistent.sock", own_worker=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("batonq: Redis: ")


def test_a_restarted_fleet_that_forgot_everything(files: Files, tmp_path: Path) -> None:
    """Redis away, and back without its data: what was under way is enqueued again by the run."""
    write_rows(files[0], prompts(40))
    first = EmbeddedServer(tmp_path / "fleet")
    process = subprocess.Popen(
        [*command(*files, own_worker=False), "--redis-url", first.url],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    with connect(first.url) as connection:
        eventually(lambda: connection.llen(keys.queue("tiny")) == 40, "all rows enqueued")
    first.kill()
    shutil.rmtree(tmp_path / "fleet" / "appendonlydir")
    assert process.stderr is not None
    while "Redis cannot serve now" not in (line := process.stderr.readline()):
        assert line, "it ended"
    with server(tmp_path / "fleet") as again:
        assert again.url == first.url
        worker = subprocess.Popen(
            [sys.executable, ANSWERING, "--redis-url", again.url, "--model", "m", "--served-model-name", "tiny"]
        )
        try:
            _, shown = process.communicate(timeout=60)
        finally:
            worker.terminate()
            worker.wait(30)
    assert process.returncode == 0, shown
    assert len(texts(files[1])) == 40


def test_the_example_file_is_good(tmp_path: Path) -> None:
    example = Path(__file__).parent.parent / "examples" / "prompts.jsonl"
    rows = [json.loads(line) for line in example.read_text().splitlines()]
    assert len(rows) >= 30
    done = run(example, tmp_path / "out.jsonl", "--on-error", "fail")
    assert done.returncode == 0, done.stderr
    assert len(read_rows(tmp_path / "out.jsonl")) == len(rows)


def test_rows_in_the_order_of_the_input(files: Files, tmp_path: Path) -> None:
    """Whatever was written in another order before; the errors too, each file by itself."""
    rows = bad_rows()
    names = ["good", "line-2", "stream", "line-4", "too long", "foreign", "last"]
    write_rows(files[0], rows)
    assert run(*files).returncode == 3
    assert [row["custom_id"] for row in read_rows(files[1])] != names
    complete = texts(files[1])
    assert run(*files, "--order").returncode == 3
    assert [row["custom_id"] for row in read_rows(files[1])] == names
    errors = tmp_path / "errors.jsonl"
    assert run(*files, "--order", "--retry-errors", "--error-file", str(errors)).returncode == 3
    assert [row["custom_id"] for row in read_rows(files[1])] == ["good", "last"]
    assert [row["custom_id"] for row in read_rows(errors)] == names[1:-1]
    assert sorted(texts(files[1]) + texts(errors)) == complete


def test_progress_on_a_terminal_is_a_bar(files: Files) -> None:
    write_rows(files[0], prompts(30))
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    env = environment(answer_seconds=0.01) | {"TERM": "xterm-256color"}
    process = subprocess.Popen(command(*files), env=env, stderr=theirs, stdin=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # what Linux answers once the last writer is gone
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert process.wait(60) == 0
    assert b"loading model" in shown
    assert b"/30" in shown
    assert b"output tokens/s" in shown
    assert b"30 of 30 rows are finished" in shown
