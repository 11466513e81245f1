"""The child process: holds the engine and the device, and does nothing but step.

Started by the parent as `python -m batonq.worker.child CHANNEL BELL MARKER PARENT`: its end of the socket pair, the
bell's end to write to, the memory of the step marker, and the parent's process id. It ends when it is told to, when the
other end is closed, and, by the kernel's hand, when the parent dies.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import signal
import socket
import sys
import time
from typing import Any

from batonq.engine.context import Context
from batonq.engine.engine import Engine
from batonq.engine.errors import EngineError
from batonq.engine.logprobs import pack, unpack
from batonq.engine.plan import ContextOutput, Plan, StepOutput
from batonq.engine.sampling_params import SamplingParams
from batonq.worker.collector import spare_collector
from batonq.worker.messages import (
    Abort,
    Add,
    Channel,
    Load,
    LoadFailed,
    Pause,
    Ready,
    Resume,
    Step,
    Stop,
    Update,
    pack_ids,
    unpack_ids,
)
from batonq.worker.scheduling import take_precedence
from batonq.worker.spelling import spell
from batonq.worker.step_log import StepLog
from batonq.worker.step_marker import StepMarker

_PR_SET_PDEATHSIG = 1
_FIELDS_WHILE_RUNNING = Update._fields.index("finish_reason")


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends; exit if that has happened already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


class CommitClock:
    """Says after which steps the parent is to commit: an interval's end is rounded to the nearest end of a step.

    A commit takes processor time that a step would lack. Between two steps the engine uses one core and leaves the
    others free, so that is the moment for it; and a step that takes longer than the interval needs one commit, not two.
    """

    def __init__(self, interval: float) -> None:
        """`interval` in seconds, as are all times."""
        self._interval = interval
        self._last = -math.inf
        self._untold = False

    def is_due(self, began: float, ended: float, *, news: bool) -> bool:
        """Whether to commit after this step, if it, or one before it, made `news`. Then the next interval begins."""
        self._untold |= news
        next_end = ended + (ended - began)
        due = self._untold and (ended + next_end) / 2 >= self._last + self._interval
        if due:
            self._last, self._untold = ended, False
        return due


class EngineLoop:
    """Steps an engine for a parent at the other end of a channel."""

    def __init__(
        self,
        channel: Channel,
        engine: Engine[Any],
        marker: StepMarker,
        log: StepLog | None,
        commit_interval: float,
    ) -> None:
        self._channel = channel
        self._engine = engine
        self._marker = marker
        self._log = log
        self._commits = CommitClock(commit_interval)
        engine.on_plan = self._mark
        #: Number of each live context, by id.
        self._numbers: dict[str, int] = {}
        #: Of those whose tokens are all there is to tell while they run.
        self._plain: dict[str, int] = {}
        self._paused = self._stopping = False

    @property
    def _idle(self) -> bool:
        return self._paused or not self._engine.has_work

    def run(self) -> None:
        """Until told to stop or the parent is gone."""
        spare_collector()
        while True:
            for message in self._channel.receive(wait=self._idle):
                self._handle(message)
            if self._stopping or self._channel.closed:
                return
            if not self._idle:
                began = time.monotonic()
                output = self._engine.step()
                if self._log is not None:
                    self._log.write(output, self._engine)
                self._report(output, began)
                self._marker.end()

    def _mark(self, plan: Plan) -> None:
        self._marker.begin(pack_ids([self._numbers[row.context.context_id] for row in plan.rows]))

    def _handle(self, message: object) -> None:
        match message:
            case Add():
                self._add(message)
            case Abort() if self._numbers.get(message.context_id) == message.number:
                self._abort(message.context_id)
            case Pause():
                self._paused = True
            case Resume():
                self._paused = False
            case Stop():
                self._stopping = True

    def _add(self, message: Add) -> None:
        self._marker.begin(pack_ids([message.number]))
        self._take_in(message)
        self._marker.end()

    def _take_in(self, message: Add) -> None:
        if message.context_id in self._numbers:  # an earlier ownership of the same context, lost since
            self._abort(message.context_id)
        try:
            context = self._add_to_engine(message)
        except EngineError as error:
            refused = Update(
                message.number,
                "ERROR",
                finish_reason="error",
                error_code=error.code,
                error_message=error.message,
                error_param=error.param,
            )
            self._channel.send(Step(0, time.time(), b"", b"", [refused]))
            return
        self._numbers[message.context_id] = message.number
        if message.alone:
            self._engine.scheduler.alone.add(message.context_id)
        if not message.streaming and context.sampling_params.logprobs is None:
            self._plain[message.context_id] = message.number
        if message.streaming and message.output_token_ids:
            # What its tokens so far show is in the stream already; a part of a character or of a stop string isn't.
            context.text.delta(final=False)

    def _abort(self, context_id: str) -> None:
        self._engine.abort(context_id)
        self._engine.forget(context_id)
        self._drop(context_id)

    def _drop(self, context_id: str) -> None:
        del self._numbers[context_id]
        self._plain.pop(context_id, None)
        self._engine.scheduler.alone.discard(context_id)

    def _add_to_engine(self, message: Add) -> Context:
        params = SamplingParams(**message.sampling)
        num_top = params.logprobs
        return self._engine.add(
            message.context_id,
            unpack_ids(message.input_token_ids),
            params,
            output_token_ids=unpack_ids(message.output_token_ids),
            output_logprobs=() if num_top is None else unpack(message.output_logprobs, num_top),
            priority=message.priority,
            is_streaming=message.streaming,
        )

    def _report(self, output: StepOutput, began: float) -> None:
        """Tell the parent of new tokens, ends, and contexts that began to run or were preempted."""
        numbers, token_ids, updates = list[int](), list[int](), list[tuple[Any, ...]]()
        ended = False
        alone = self._engine.scheduler.alone
        proven = any(part.context_id in alone for part in output.outputs)
        if proven:
            alone.clear()
        for part in output.outputs:
            number = self._plain.get(part.context_id)
            if part.finish_reason is not None:
                updates.append(self._ending(part))
                ended = True
            elif number is None:
                updates.append(self._update(part)[:_FIELDS_WHILE_RUNNING])
            else:
                numbers += [number] * len(part.new_token_ids)
                token_ids += part.new_token_ids
        for context_id in (*output.started, *output.preempted):
            if context_id in self._numbers:
                state = str(self._engine.contexts[context_id].state)
                updates.append((self._numbers[context_id], state))
        due = self._commits.is_due(began, time.monotonic(), news=bool(numbers or updates))
        step = Step(output.decision_id, time.time(), pack_ids(numbers), pack_ids(token_ids), updates, due)
        # As long as more contexts are here than run at once, the next ones can come with the next commit.
        hungry = ended and len(self._numbers) <= self._engine.config.max_num_seqs
        # Where a suspect is cleared, the next one may come.
        self._channel.send(step, ring=due or hungry or proven)

    def _update(self, part: ContextOutput) -> Update:
        context = self._engine.contexts[part.context_id]
        num_top = context.sampling_params.logprobs
        return Update(
            self._numbers[part.context_id],
            str(context.state),
            pack_ids(part.new_token_ids),
            b"" if num_top is None else pack(part.new_logprobs, num_top),
            context.text.delta(final=False) if context.is_streaming else "",
        )

    def _ending(self, part: ContextOutput) -> Update:
        update = self._update(part)
        context = self._engine.contexts[part.context_id]
        last_text = context.text.delta(final=True) if context.is_streaming else ""
        generation = self._engine.forget(part.context_id)
        self._drop(part.context_id)
        vocabulary, params, error = self._engine.vocabulary, context.sampling_params, generation.error
        return update._replace(
            finish_reason=str(generation.finish_reason),
            text=generation.text,
            last_text=last_text,
            cached_tokens=generation.num_cached_tokens,
            logprobs=None if params.logprobs is None else spell(generation.logprobs, vocabulary),
            prompt_logprobs=None if params.prompt_logprobs is None else spell(generation.prompt_logprobs, vocabulary),
            error_code=error.code if error else None,
            error_message=error.message if error else None,
            error_param=error.param if error else None,
        )


def load(channel: Channel, message: Load) -> Engine[Any] | None:
    """Build the engine and tell the parent what it can take, or why it can't be built."""
    try:
        engine, directory = importlib.import_module(message.engine).load_engine(message.options)
    except (EngineError, ImportError, OSError) as error:
        code = error.code if isinstance(error, EngineError) else type(error).__name__
        channel.send(LoadFailed(code, str(error)))
        return None
    limits = engine.limits
    channel.send(
        Ready(
            str(directory),
            limits.max_model_len,
            limits.kv_cache_tokens,
            limits.vocab_size,
            engine.config.max_num_seqs,
            engine.spec.numerics_id,
            engine.spec.weights_id,
        )
    )
    return engine  # type: ignore[no-any-return]


def main() -> int:
    """Serve the parent, as the command line says."""
    channel_fd, bell_fd, marker_fd, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    take_precedence()
    for request in (signal.SIGINT, signal.SIGTERM):
        signal.signal(request, signal.SIG_IGN)  # a terminal or a supervisor signals the whole group; the parent answers
    channel = Channel(socket.socket(fileno=channel_fd), bell_fd)
    for message in channel.receive(wait=True):
        assert isinstance(message, Load)
        engine = load(channel, message)
        if engine is None:
            return 1
        EngineLoop(channel, engine, StepMarker(marker_fd), StepLog.wanted(), message.commit_interval).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
