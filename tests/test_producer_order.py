"""Output files over many lives of a run, killed anywhere: each row once, and with `--order` in the order of the input.

The life of a run is acted out on the index and the files alone, so that hundreds of them take seconds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from batonq.producer.held import HeldLine
from batonq.producer.index import RowState
from batonq.producer.matching import match_output
from batonq.producer.output import error_line, result_line
from batonq.producer.schema import Choice, ErrorInfo, Result
from batonq.producer.sinks import Sinks
from batonq.producer.state import RunState
from tests.support.running import prompts, read_rows, write_rows

_ROWS = 30


@dataclass
class Life:
    """What one command asked for, and how far it comes: `kill_after` lines of its work, None for all of it."""

    order: bool
    retry_errors: bool = False
    limit: int | None = None
    error_file: bool = False
    kill_after: int | None = None


class Run:
    def __init__(self, directory: Path, draw: random.Random) -> None:
        self.source = directory / "in.jsonl"
        self.output = directory / "out.jsonl"
        self.errors = directory / "errors.jsonl"
        self.draw = draw
        rows = [*prompts(_ROWS), b"nonsense\n", prompts(1)[0], prompts(1)[0], {"custom_id": "last", "prompt": "z"}]
        write_rows(self.source, rows)
        self.count = len(rows)

    def live(self, life: Life) -> None:
        state = RunState(self.output)
        state.index_input(self.source, "tiny", lambda _count: None)
        last = state.index.last_number(life.limit)
        error_file = self.errors if life.error_file else None
        paths = [self.output, *state.note_error_file(error_file)]
        match_output(state.index, paths, last=last, retry_errors=life.retry_errors, order=life.order)
        with Sinks(state.index, self.output, error_file, order=life.order, last=last) as sinks:
            sinks.release()
            self.work(state, sinks, last, life.kill_after)
        state.close()
        if life.kill_after is not None and self.draw.random() < 0.5:
            with self.output.open("ab") as file:
                file.write(b'{"id": "batch_req_01", "cust')

    def work(self, state: RunState, sinks: Sinks, last: int, kill_after: int | None) -> None:
        """Finish rows in any order, in batches; a kill comes between writing and recording, or before a release."""
        rows = state.index.unfinished(0, last, 10**6)
        self.draw.shuffle(rows)
        done = 0
        while rows:
            batch = [rows.pop() for _ in range(min(len(rows), self.draw.randint(1, 5)))]
            lines = []
            for row in batch:
                error = row.error or (ErrorInfo(code="bad_luck", message="m") if self.draw.random() < 0.3 else None)
                choice = Choice(index=0, text="x", token_ids=[1], finish_reason="stop")
                result = Result(id=row.job_id, model="tiny", choices=[choice])
                line = error_line(row, error) if error else result_line(row, result)
                lines.append(HeldLine(row.number, row.job_id, error is not None, line))
            sinks.write(lines)
            done += len(batch)
            if kill_after is not None and done > kill_after and self.draw.random() < 0.5:
                return
            state.index.record((n, RowState.ERROR if error else RowState.DONE) for n, _, error, _ in lines)
            if kill_after is not None and done > kill_after:
                return
            sinks.release()

    def numbers(self, path: Path) -> list[int]:
        """Line numbers of the rows of an output file, in the file's order."""
        seen: dict[str, int] = {}
        found = []
        for row in read_rows(path) if path.exists() else []:
            name = str(row["custom_id"])
            if row["error"] is not None and row["error"]["code"] in ("duplicate_custom_id", "invalid_json"):
                found.append(row["error"]["line"])
            else:
                assert seen.setdefault(name, 0) == 0, f"{name} twice"
                seen[name] = 1
                found.append(self.count if name == "last" else 1 + int(name.split()[1]))
        return found


@pytest.mark.parametrize("seed", range(40))
def test_lives_that_are_killed(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    run = Run(tmp_path, draw)
    for _ in range(draw.randint(1, 5)):
        run.live(
            Life(
                order=draw.random() < 0.6,
                retry_errors=draw.random() < 0.3,
                limit=draw.choice([None, None, draw.randint(1, _ROWS)]),
                error_file=seed % 3 == 0,
                kill_after=draw.choice([None, draw.randint(0, _ROWS)]),
            )
        )
    run.live(Life(order=True, error_file=seed % 3 == 0))
    found = [run.numbers(run.output), run.numbers(run.errors)]
    assert sorted(found[0] + found[1]) == list(range(1, run.count + 1))
    assert found == [sorted(part) for part in found]


def test_with_order_the_file_is_at_any_time_the_beginning_of_the_whole(tmp_path: Path) -> None:
    run = Run(tmp_path, random.Random(0))
    for kill_after in range(0, _ROWS, 4):
        run.live(Life(order=True, kill_after=kill_after))
        lines = [line for line in run.output.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        run.output.write_bytes(b"".join(lines))
        assert run.numbers(run.output) == list(range(1, len(lines) + 1))


def test_without_order_nothing_stays_held(tmp_path: Path) -> None:
    run = Run(tmp_path, random.Random(1))
    run.live(Life(order=True, kill_after=10))
    before = len(run.numbers(run.output)) if run.output.read_bytes().endswith(b"\n") else 0
    run.live(Life(order=False, kill_after=0))
    assert len(run.output.read_bytes().splitlines()) > before + 5


def test_a_limit_hides_nothing_that_is_done(tmp_path: Path) -> None:
    run = Run(tmp_path, random.Random(2))
    run.live(Life(order=False))
    lines = sorted(run.output.read_bytes().splitlines())
    run.live(Life(order=True, limit=3))
    assert sorted(run.output.read_bytes().splitlines()) == lines
    assert run.numbers(run.output) == list(range(1, run.count + 1))
    run.live(Life(order=False, limit=3, retry_errors=True))
    assert sorted(run.numbers(run.output)) == list(range(1, run.count + 1))


def test_an_error_file_is_remembered(tmp_path: Path) -> None:
    run = Run(tmp_path, random.Random(3))
    run.live(Life(order=False, error_file=True))
    assert run.numbers(run.errors)
    before = run.output.read_bytes()
    run.live(Life(order=False))
    assert run.output.read_bytes() == before  # its errors are finished rows, though the file is not named again


def test_held_rows_of_another_input_are_dropped(tmp_path: Path) -> None:
    run = Run(tmp_path, random.Random(4))
    run.live(Life(order=True, kill_after=20))
    changed = [{**row, "max_tokens": 6} for row in prompts(_ROWS)]
    write_rows(run.source, changed)
    state = RunState(run.output)
    state.index_input(run.source, "tiny", lambda _count: None)
    match_output(state.index, [run.output], last=_ROWS, order=True)
    assert state.index.held.before(10**9, 100) == []
    state.close()
