"""The state directory: its lock, the index of the input, and what the output file says about it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batonq.producer import state as state_module
from batonq.producer.errors import StateError
from batonq.producer.index import Counts, RowState
from batonq.producer.matching import match_output
from batonq.producer.output import OutputFile, error_line, result_line
from batonq.producer.schema import Choice, ErrorInfo, Result
from batonq.producer.state import RunState
from tests.support.running import prompts, read_rows, write_rows


def indexed(tmp_path: Path, *rows: object) -> RunState:
    state = RunState(tmp_path / "out.jsonl")
    state.index_input(write_rows(tmp_path / "in.jsonl", rows), "tiny", lambda _count: None)
    return state


def finish(state: RunState, *numbers: int, error: str | None = None) -> None:
    """Write output for these lines, as a run would."""
    sink = OutputFile(state.output)
    for row in state.index.unfinished(0, 10**9, 10**6):
        if row.number in numbers:
            choice = Choice(index=0, text="x", token_ids=[1], finish_reason="stop")
            result = Result(id=row.job_id, model="tiny", choices=[choice])
            sink.write([error_line(row, ErrorInfo(code=error, message="m")) if error else result_line(row, result)])
    sink.close()


def unfinished(state: RunState) -> list[int]:
    return [row.number for row in state.index.unfinished(0, 10**9, 10**6)]


def test_a_second_run_into_the_same_output_is_told_who_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "_LOCK_SECONDS", 0.05)
    state = RunState(tmp_path / "out.jsonl")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "out.jsonl")
    for path in (tmp_path / "out.jsonl", tmp_path / "link.jsonl"):
        with pytest.raises(StateError, match=str(os.getpid())) as caught:
            RunState(path)
        assert caught.value.code == "run_locked"
    run_id = state.run_id
    state.close()
    again = RunState(tmp_path / "out.jsonl")
    assert again.run_id == run_id
    again.close()


def test_rows_are_found_again_where_they_lie(tmp_path: Path) -> None:
    state = indexed(tmp_path, b"\xef\xbb\xbf", *prompts(3), b"\n  \n", {"prompt": "ünï"}, b"bad\n")
    rows = state.index.unfinished(0, 10**9, 100)
    data = (tmp_path / "in.jsonl").read_bytes()
    assert [row.number for row in rows] == [1, 2, 3, 6, 7]
    assert data[rows[3].offset :][: rows[3].length].decode() == '{"prompt": "ünï"}\n'
    assert [row.custom_id for row in rows] == ["row 0", "row 1", "row 2", "line-6", "line-7"]
    assert rows[4].error is not None
    assert state.index.last_number(2) == 2
    assert state.index.last_number(4) == 6
    assert state.index.last_number(None) == state.index.last_number(99) == 7


def test_an_empty_input(tmp_path: Path) -> None:
    state = indexed(tmp_path)
    assert state.index.counts(state.index.last_number(None)) == Counts(0, 0, 0)


def test_duplicates_name_both_lines(tmp_path: Path) -> None:
    state = indexed(
        tmp_path, *prompts(2), {"custom_id": "row 0", "prompt": "other"}, {"custom_id": "row 0", "prompt": 5}
    )
    found = state.index.refused(10**9, 100, duplicates=True)
    assert [(row.number, row.duplicate_of) for row in found] == [(3, 1), (4, 1)]
    assert all(row.error is not None and row.error.code == "duplicate_custom_id" for row in found)
    assert state.index.refused(10**9, 100, duplicates=False) == []


def test_the_output_is_the_truth(tmp_path: Path) -> None:
    state = indexed(tmp_path, *prompts(6))
    jobs = {row.number: row.job_id for row in state.index.unfinished(0, 10**9, 100)}
    finish(state, 1, 4)
    finish(state, 5, error="context_length_exceeded")
    state.index.record([(2, RowState.DONE), (3, RowState.ENQUEUED), (4, RowState.ENQUEUED)])  # is not believed
    with state.output.open("ab") as file:
        file.write(b'{"id": "batch_req_abc", "custom_')
    match_output(state.index, [state.output], last=9)
    assert unfinished(state) == [2, 3, 6]
    assert state.index.counts(10**9) == Counts(6, 2, 1)
    assert len(read_rows(state.output)) == 3
    assert list(state.index.stale_jobs()) == [jobs[4]]  # written, but perhaps not deleted
    match_output(state.index, [state.output], last=9, retry_errors=True)
    assert unfinished(state) == [2, 3, 5, 6]
    assert [row["custom_id"] for row in read_rows(state.output)] == ["row 0", "row 3"]
    assert set(state.index.stale_jobs()) == {jobs[4], jobs[5]}


@pytest.mark.parametrize(
    "content", [b"my diary, without a line's end", b"my diary\n", b'{"custom_id": "a"}\n', b"[]\n"]
)
def test_a_file_that_is_no_output_is_left_alone(tmp_path: Path, content: bytes) -> None:
    state = indexed(tmp_path, *prompts(1))
    for retry_errors in (False, True):
        state.close()
        state = RunState(state.output)
        state.output.write_bytes(content)
        with pytest.raises(StateError, match="line 1"):
            match_output(state.index, [state.output], last=9, retry_errors=retry_errors)
        assert state.output.read_bytes() == content


def test_an_unchanged_input_is_not_read_again(tmp_path: Path) -> None:
    state = indexed(tmp_path, *prompts(3))
    state.index.record([(1, RowState.ENQUEUED)])
    state.index_input(tmp_path / "in.jsonl", "tiny", lambda _count: None)
    assert list(state.index.stale_jobs()) == []


def test_a_changed_input_is_read_again_and_keeps_what_is_the_same(tmp_path: Path) -> None:
    state = indexed(tmp_path, *prompts(4))
    finish(state, 1, 3)
    before = {row.number: row.job_id for row in state.index.unfinished(0, 10**9, 100)}
    state.index.record([(2, RowState.ENQUEUED), (4, RowState.ENQUEUED)])
    changed = [prompts(4)[2], prompts(4)[1], {"custom_id": "new", "prompt": "new"}]
    state.index_input(write_rows(tmp_path / "in.jsonl", changed), "tiny", lambda _count: None)
    match_output(state.index, [state.output], last=9)
    assert [row.custom_id for row in state.index.unfinished(0, 10**9, 100)] == ["row 1", "new"]
    assert state.index.unfinished(0, 2, 100)[0].job_id == before[2]
    assert list(state.index.stale_jobs()) == [before[4]]


def test_a_run_keeps_its_model(tmp_path: Path) -> None:
    state = indexed(tmp_path, *prompts(1))
    state.bind_model("tiny")
    state.bind_model("tiny")
    with pytest.raises(StateError) as caught:
        state.bind_model("large")
    assert caught.value.code == "other_model"


def test_starting_afresh_gives_other_ids(tmp_path: Path) -> None:
    state = indexed(tmp_path, *prompts(2))
    before = [row.job_id for row in state.index.unfinished(0, 10**9, 100)]
    state.index.record([(1, RowState.ENQUEUED)])
    state.start_afresh()
    state.index_input(tmp_path / "in.jsonl", "tiny", lambda _count: None)
    assert not {row.job_id for row in state.index.unfinished(0, 10**9, 100)} & set(before)
    assert list(state.index.stale_jobs()) == before[:1]


def test_a_full_disk_leaves_no_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = OutputFile(tmp_path / "out.jsonl")
    sink.write([b"one\n"])
    write = os.write

    def half_then_full(fd: int, data: bytes) -> int:
        if len(data) < 4:
            raise OSError(28, "No space left on device")
        return write(fd, data[:2])

    monkeypatch.setattr(os, "write", half_then_full)
    with pytest.raises(StateError, match="No space left"):
        sink.write([b"two\n"])
    assert (tmp_path / "out.jsonl").read_bytes() == b"one\n"
    sink.close()
