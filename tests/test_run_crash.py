"""`batonq run` killed and interrupted as real processes: nothing lost, nothing twice, nobody left behind."""

from __future__ import annotations

import io
import os
import random
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from batonq.producer.progress import Reporter
from batonq.producer.run import RunOptions
from batonq.producer.run import run as run_rows
from batonq.producer.state import RunState
from tests.support.answering import answer
from tests.support.running import (
    answered,
    jobs_in_redis,
    leftovers,
    prompts,
    read_rows,
    run,
    start,
    state_directory,
    texts,
    write_rows,
)
from tests.support.servers import eventually

_ROWS = 300


def lines(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0


#: The output that is right, however often it is disturbed.
EXPECTED = sorted((row["custom_id"], answer(row["prompt"])) for row in prompts(_ROWS))


def test_killed_at_random_and_resumed(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", prompts(_ROWS))
    output = tmp_path / "out.jsonl"
    draw = random.Random(0)
    kills = 0
    while lines(output) < _ROWS - 60:
        target = lines(output) + draw.randint(0, 80)
        process = start(source, output, "--max-in-flight", "64", answer_seconds=0.001)
        eventually(lambda p=process, t=target: lines(output) > t or p.poll() is not None, "progress")  # type: ignore[misc]
        process.send_signal(signal.SIGKILL)
        process.communicate()
        eventually(lambda: not leftovers(output), "worker and server gone")
        kills += 1
        if kills % 2:
            with output.open("ab") as file:  # as if the kill had cut a line off
                file.write(b'{"id": "batch_req_0123", "custom_id": "row')
    assert kills >= 3
    last = run(source, output)
    assert last.returncode == 0, last.stderr
    assert texts(output) == EXPECTED
    assert len(answered(output)) == _ROWS  # none of them twice
    assert jobs_in_redis(output) == []


def test_the_server_of_a_killed_run_cannot_be_met_by_the_next(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", prompts(_ROWS))
    output = tmp_path / "out.jsonl"
    for _ in range(5):
        process = start(source, output, answer_seconds=0.002)
        eventually(lambda p=process: leftovers(output) and p.poll() is None, "started")  # type: ignore[misc]
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert run(source, output).returncode == 0  # at once, without waiting for anybody
    assert len(answered(output)) == _ROWS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_once(tmp_path: Path, number: signal.Signals) -> None:
    source = write_rows(tmp_path / "in.jsonl", prompts(_ROWS))
    output = tmp_path / "out.jsonl"
    process = start(source, output, answer_seconds=0.005)
    eventually(lambda: lines(output) > 5, "some rows")
    process.send_signal(number)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 130, shown
    assert "the same command resumes" in shown
    assert leftovers(output) == []
    done = lines(output)
    assert 5 < done < _ROWS
    assert len(answered(output)) == done  # what was finished was also written
    assert run(source, output).returncode == 0
    assert texts(output) == EXPECTED
    assert len(answered(output)) == _ROWS


def test_a_terminals_interrupt_reaches_the_run_only(tmp_path: Path) -> None:
    """Ctrl-C goes to the whole foreground group; the worker must not be in it."""
    source = write_rows(tmp_path / "in.jsonl", prompts(_ROWS))
    output = tmp_path / "out.jsonl"
    process = start(source, output, answer_seconds=0.005)
    eventually(lambda: lines(output) > 5, "some rows")
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 2
    assert {os.getpgid(child.pid) for child in children} == {child.pid for child in children}
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(answered(output)) == lines(output)


def test_interrupted_twice(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", prompts(_ROWS))
    output = tmp_path / "out.jsonl"
    process = start(source, output, answer_seconds=0.3)
    eventually(lambda: lines(output) > 0, "a row")
    (worker,) = [p for p in psutil.Process(process.pid).children() if "answering" in " ".join(p.cmdline())]
    worker.suspend()  # so that it cannot end by itself
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "once more to stop at once" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "stopped; the same command resumes" in shown
    eventually(lambda: not leftovers(output), "worker and server gone")
    assert run(source, output).returncode == 0
    assert texts(output) == EXPECTED


def test_interrupted_while_the_input_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunState, "index_input", interrupted)
    source = write_rows(tmp_path / "in.jsonl", prompts(1))
    options = RunOptions(input=source, output=tmp_path / "out.jsonl", model="tiny", overwrite=True)
    shown = io.StringIO()
    assert run_rows(options, Reporter(shown)) == 130
    assert shown.getvalue() == "batonq: stopped; the same command without --overwrite resumes\n"


def test_two_runs_into_one_output(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", prompts(_ROWS))
    output = tmp_path / "out.jsonl"
    process = start(source, output, answer_seconds=0.5)
    eventually(lambda: lines(output) > 0, "a row")
    second = run(source, output)
    assert second.returncode == 1
    assert f"process {process.pid} is running" in second.stderr
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


def living_workers(run_pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(run_pid).children() if is_living_worker(child)]


def is_living_worker(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "answering" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it has ended since
        return False


def test_a_worker_that_dies_is_started_again(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", prompts(_ROWS))
    output = tmp_path / "out.jsonl"
    process = start(source, output, answer_seconds=0.003)
    for target in (5, 60, 120, 180):  # more often than it may without progress
        eventually(lambda t=target: lines(output) > t, "rows")  # type: ignore[misc]
        eventually(lambda: living_workers(process.pid), "a worker")[0].kill()
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 0, shown
    assert "started again" in shown
    assert texts(output) == EXPECTED
    assert len(answered(output)) == _ROWS


def test_a_worker_that_always_dies_stops_the_run_with_its_log(tmp_path: Path) -> None:
    rows = [*prompts(3), {"custom_id": "poison", "prompt": "die: now"}, *prompts(5)[3:]]
    output = tmp_path / "out.jsonl"
    done = run(write_rows(tmp_path / "in.jsonl", rows), output)
    assert done.returncode == 1
    assert "died 4 times" in done.stderr
    assert "exit code 70" in done.stderr
    assert leftovers(output) == []
    assert len(read_rows(output)) == 3
    fixed = [row if row["custom_id"] != "poison" else {"custom_id": "poison", "prompt": "live"} for row in rows]
    assert run(write_rows(tmp_path / "in.jsonl", fixed), output).returncode == 0
    assert len(texts(output)) == 6
    assert jobs_in_redis(output) == []


def test_a_worker_that_cannot_start(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", prompts(3))
    output = tmp_path / "out.jsonl"
    done = run(source, output, "--model", "no-such-model")
    assert done.returncode == 1
    assert "there is no model no-such-model" in done.stderr
    assert leftovers(output) == []
    done = run(source, output, "--model", "no-such-model", "--worker-command", "/nonexistent/worker")
    assert done.returncode == 1
    assert "cannot be started: /nonexistent/worker" in done.stderr


def test_a_server_that_dies_stops_the_run_resumably(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", prompts(_ROWS))
    output = tmp_path / "out.jsonl"
    process = start(source, output, answer_seconds=0.003)
    eventually(lambda: lines(output) > 5, "some rows")
    for child in psutil.Process(process.pid).children():
        if "valkey" in child.name():
            child.kill()
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the embedded server ended with code -9" in shown
    assert (state_directory(output) / "valkey" / "server.log").exists()
    assert leftovers(output) == []
    assert run(source, output).returncode == 0
    assert texts(output) == EXPECTED


def test_progress_off_a_terminal_is_lines_and_the_output_is_only_a_file(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", prompts(3))
    done = run(source, tmp_path / "out.jsonl")
    assert isinstance(done, subprocess.CompletedProcess)
    assert done.stdout == ""
    assert all(line.startswith("batonq: ") for line in done.stderr.splitlines())
    assert "\x1b" not in done.stderr
