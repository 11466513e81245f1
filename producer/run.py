"""`batonq run`: every row of an input file through the model, into an output file, whatever happens in between."""

from __future__ import annotations

import shlex
import sqlite3
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import redis
from redis import exceptions as redis_errors

from batonq.producer import keys
from batonq.producer.client import Producer
from batonq.producer.dispatch import Dispatch
from batonq.producer.errors import InputError, StateError
from batonq.producer.interrupt import EXIT_CODE as INTERRUPTED
from batonq.producer.interrupt import Interrupt
from batonq.producer.local import LocalFleet
from batonq.producer.matching import match_output
from batonq.producer.process import spare_collector
from batonq.producer.progress import Reporter
from batonq.producer.sinks import Sinks
from batonq.producer.state import RunState

SOME_ROWS_ARE_ERRORS = 3

#: How often every row under way is looked at, in seconds, in case word of its end was lost.
_RECONCILE_SECONDS = 30.0
_WAIT_SECONDS = 0.5
_AWAY_SECONDS = 1.0
_LISTED = 10
_WORKER = (sys.executable, "-m", "batonq.worker")

#: Redis can't serve now, and will again.
_AWAY = (redis.ConnectionError, redis.TimeoutError, redis_errors.OutOfMemoryError, redis_errors.ReadOnlyError)


@dataclass(frozen=True)
class RunOptions:
    """What `batonq run` was asked for; the command line explains each."""

    input: Path
    output: Path
    model: str
    served_model_name: str | None = None
    redis_url: str | None = None
    error_file: Path | None = None
    on_error: str = "continue"
    on_duplicate: str = "fail"
    overwrite: bool = False
    retry_errors: bool = False
    limit: int | None = None
    order: bool = False
    max_in_flight: int = 1024
    worker_command: str | None = None
    engine_options: Sequence[str] = ()

    @property
    def queue(self) -> str:
        """The served model name, which is the queue's name."""
        return self.served_model_name or Path(self.model).name


def run(options: RunOptions, reporter: Reporter) -> int:
    """Run it and return the exit code: 0, 3 if some rows are errors, 130 if interrupted. Raises ProducerError."""
    _check_paths(options)
    try:
        return _run(options, reporter)
    except KeyboardInterrupt:  # while input or output were read: there is nothing to wind up
        reporter.note(_how_to_resume(options))
        return INTERRUPTED
    except sqlite3.Error as error:
        raise StateError("index_failed", f"the index of {options.output} cannot be used: {error}") from error


def _run(options: RunOptions, reporter: Reporter) -> int:
    with ExitStack() as stack:
        state = RunState(options.output)
        stack.callback(state.close)
        last = _prepare(options, state, reporter)
        sinks = Sinks(state.index, options.output, options.error_file, order=options.order, last=last)
        stack.enter_context(sinks)
        sinks.release()
        counts = state.index.counts(last)
        finished = counts.done + counts.errors
        if finished < counts.total:
            interrupt = stack.enter_context(Interrupt(_how_to_resume(options)))
            stack.callback(reporter.end)
            reporter.begin(counts.total, finished)
            _Run(options, state, sinks, reporter, interrupt, last).work()
        counts = state.index.counts(last)
        reporter.end()
        _summarize(options, reporter, counts.total, counts.done, counts.errors)
        if counts.done + counts.errors < counts.total:
            return INTERRUPTED
        return SOME_ROWS_ARE_ERRORS if counts.errors else 0


def _check_paths(options: RunOptions) -> None:
    if options.redis_url and (options.worker_command or options.engine_options):
        raise InputError("no_own_worker", "with a Redis URL the fleet's workers are used: give their options to them")
    if not options.input.is_file():
        raise InputError("no_input", f"there is no input file {options.input}", path=str(options.input))
    files = [("output", options.output), ("error file", options.error_file)]
    seen = {options.input.resolve(): "input"}
    for name, path in files:
        if path is None:
            continue
        same = seen.setdefault(path.resolve(), name)
        if same != name or (path.exists() and path.samefile(options.input)):
            raise InputError("same_file", f"{same if same != name else 'input'} and {name} are the same file: {path}")
        if not path.parent.is_dir() or path.is_dir():
            raise InputError("no_directory", f"the {name} cannot be written: {path}", path=str(path))


def _prepare(options: RunOptions, state: RunState, reporter: Reporter) -> int:
    """Bring the index in line with input and output; return the line number of the last row to run."""
    if options.overwrite:
        state.start_afresh()
    state.bind_model(options.queue)
    state.index_input(options.input, options.queue, lambda count: reporter.phase(f"read {count} rows"))
    last = state.index.last_number(options.limit)
    _refuse_bad_rows(options, state, last)
    paths = [options.output.resolve(), *state.note_error_file(options.error_file)]
    if options.overwrite:
        for path in paths:
            path.unlink(missing_ok=True)
    options.output.touch()
    match_output(state.index, paths, last=last, retry_errors=options.retry_errors, order=options.order)
    state.index.settle()
    if other := state.index.get("other_model"):
        reporter.note(f"{other}; all rows are run with {options.queue}")
    return last


def _refuse_bad_rows(options: RunOptions, state: RunState, last: int) -> None:
    """Stop before any work for rows that the options say to stop for."""
    for duplicates, policy, code in (
        (True, options.on_duplicate, "duplicate_custom_id"),
        (False, options.on_error, "invalid_rows"),
    ):
        if policy != "fail" or not (rows := state.index.refused(last, _LISTED + 1, duplicates=duplicates)):
            continue
        lines = [f"line {row.number}: {row.error.code}: {row.error.message}" for row in rows if row.error is not None]
        more = ["and more"] if len(lines) > _LISTED else []
        flag = "--on-duplicate error" if duplicates else "--on-error continue"
        heading = f"{options.input} has rows that cannot be run ({flag} gives each an error row):"
        text = "\n  ".join([heading, *lines[:_LISTED], *more])
        raise InputError(code, text, lines=[row.number for row in rows[:_LISTED]])


def _summarize(options: RunOptions, reporter: Reporter, total: int, done: int, errors: int) -> None:
    resumed = f", resumed {reporter.resumes} times" if reporter.resumes else ""
    reporter.note(
        f"{done + errors} of {total} rows are finished, {errors} of them errors; this time {reporter.rows} rows, "
        f"{reporter.tokens} output tokens in {reporter.seconds:.1f} s{resumed}; output: {options.output}"
    )
    if done + errors < total:
        reporter.note(_how_to_resume(options))


def _how_to_resume(options: RunOptions) -> str:
    return f"stopped; the same command {'without --overwrite ' if options.overwrite else ''}resumes"


class _Run:
    """One run at work: where its Redis is, its loop, and its end."""

    def __init__(
        self, options: RunOptions, state: RunState, sinks: Sinks, reporter: Reporter, interrupt: Interrupt, last: int
    ) -> None:
        self._options = options
        self._state = state
        self._sinks = sinks
        self._reporter = reporter
        self._interrupt = interrupt
        self._last = last
        self._local: LocalFleet | None = None
        self._looked_at = time.monotonic()

    def work(self) -> None:
        """Until every row is finished or the user stops it. Raises ServerError, WorkerError, redis's errors."""
        with ExitStack() as stack:
            producer = Producer(self._options.redis_url or self._start_local(stack))
            stack.callback(producer.connection.close)
            rows = self._dispatch(producer, stack)
            producer.delete(self._state.index.stale_jobs())
            self._state.index.clear_stale()
            self._await_worker(producer)
            self._reporter.phase("running")
            self._loop(rows)
            if self._interrupt.requested:
                self._wind_up(rows)
            else:
                producer.connection.delete(keys.done(self._state.run_id))

    def _start_local(self, stack: ExitStack) -> str:
        options = self._options
        program = shlex.split(options.worker_command) if options.worker_command else _WORKER
        model = ["--model", options.model, "--served-model-name", options.queue]
        self._local = LocalFleet(self._state, [*program, *model, *options.engine_options], options.queue)
        stack.callback(self._local.stop)
        self._interrupt.kill = self._local.kill
        return self._local.url

    def _dispatch(self, producer: Producer, stack: ExitStack) -> Dispatch:
        options = self._options
        return Dispatch(
            producer,
            self._state,
            stack.enter_context(options.input.open("rb")),
            self._sinks,
            self._reporter,
            model=options.queue,
            last=self._last,
            max_in_flight=options.max_in_flight,
        )

    def _await_worker(self, producer: Producer) -> None:
        if self._local is not None:
            self._reporter.phase("loading model")
            self._local.start_worker(lambda: not self._interrupt.requested)
        elif not producer.connection.scard(keys.workers_of_queue(self._options.queue)):
            self._reporter.note(f"no worker serves {self._options.queue} yet; its rows wait for one")

    def _loop(self, rows: Dispatch) -> None:
        spare_collector()
        away = False
        reconcile_at = time.monotonic() + _RECONCILE_SECONDS
        while not (rows.finished or self._interrupt.requested):
            try:
                if away or time.monotonic() >= reconcile_at:
                    rows.reconcile()
                    reconcile_at = time.monotonic() + _RECONCILE_SECONDS
                ended = rows.wait(_WAIT_SECONDS) if rows.in_flight else []
                rows.collect(ended)
                rows.refill()
                away = False
                if ended:
                    time.sleep(self._gathering_seconds(len(ended), rows.in_flight))
            except redis.AuthenticationError:
                raise
            except _AWAY as error:
                self._check_local()
                if not away:
                    self._reporter.note(f"Redis cannot serve now, waiting for it: {error}")
                away = True
                time.sleep(_AWAY_SECONDS)
            self._check_local()
            self._reporter.tick()

    def _gathering_seconds(self, ended: int, in_flight: int) -> float:
        """How long to let ended rows gather, since to look for few takes the processors nearly as long as for many.

        Not so long that more than an eighth of those under way end meanwhile: the worker never waits for rows, and the
        last ones are looked for at once.
        """
        now = time.monotonic()
        seconds_per_row, self._looked_at = (now - self._looked_at) / ended, now
        return min(_WAIT_SECONDS, in_flight // 8 * seconds_per_row)

    def _check_local(self) -> None:
        if self._local is not None and (news := self._local.check(self._reporter.rows)):
            self._reporter.note(news)

    def _wind_up(self, rows: Dispatch) -> None:
        """Have the worker hand back what it runs, and write what has been finished."""
        if self._local is not None:
            self._reporter.phase("waiting for the worker to hand back its rows")
            self._local.stop_worker()
        try:
            rows.reconcile(enqueue=False)
        except _AWAY as error:
            self._reporter.note(f"what is finished is left in Redis, which cannot serve now: {error}")
