"""The child process: holds the engine and the device, and does nothing but step.

Started by the parent as `python -m batonq.worker.child FD`, where FD is its end of the socket pair. It ends when it is
told to, when the other end is closed, and, by the kernel's hand, when the parent dies.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import socket
import sys
from dataclasses import replace
from typing import Any

from batonq.engine.context import Context
from batonq.engine.engine import Engine
from batonq.engine.errors import EngineError
from batonq.engine.logprobs import pack, unpack
from batonq.engine.plan import ContextOutput, StepOutput
from batonq.engine.sampling_params import SamplingParams
from batonq.worker.messages import (
    Abort,
    Add,
    Channel,
    Load,
    LoadFailed,
    Ready,
    Step,
    Stop,
    Update,
    pack_ids,
    to_list,
    unpack_ids,
)
from batonq.worker.spelling import spell

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends; exit if that has happened already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


class EngineLoop:
    """Steps an engine for a parent at the other end of a channel."""

    def __init__(self, channel: Channel, engine: Engine[Any]) -> None:
        self._channel = channel
        self._engine = engine
        #: Execution id of each live context.
        self._executions: dict[str, str] = {}
        self._stopping = False

    def run(self) -> None:
        """Until told to stop or the parent is gone."""
        while True:
            for message in self._channel.receive(wait=not self._engine.has_work):
                self._handle(message)
            if self._stopping or self._channel.closed:
                return
            if self._engine.has_work:
                self._report(self._engine.step())

    def _handle(self, message: object) -> None:
        match message:
            case Add():
                self._add(message)
            case Abort() if self._executions.get(message.context_id) == message.execution_id:
                self._engine.abort(message.context_id)
                self._engine.forget(message.context_id)
                del self._executions[message.context_id]
            case Stop():
                self._stopping = True

    def _add(self, message: Add) -> None:
        if message.context_id in self._executions:  # an earlier ownership of the same context, lost since
            self._engine.abort(message.context_id)
            self._engine.forget(message.context_id)
        try:
            context = self._add_to_engine(message)
        except EngineError as error:
            self._executions.pop(message.context_id, None)
            refused = Update(
                message.execution_id,
                message.context_id,
                "ERROR",
                finish_reason="error",
                error_code=error.code,
                error_message=error.message,
                error_param=error.param,
            )
            self._channel.send(Step(0, [to_list(refused)]))
        else:
            self._executions[message.context_id] = message.execution_id
            if message.streaming and message.output_token_ids:
                # What its tokens so far show is in the stream already; a part of a character or of a stop string isn't.
                context.text.delta(final=False)

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

    def _report(self, output: StepOutput) -> None:
        """Tell the parent of new tokens, ends, and contexts that began to run or were preempted."""
        updates = []
        told = {part.context_id for part in output.outputs}
        for part in output.outputs:
            update = self._update(part)
            updates.append(to_list(self._ending(update) if part.finish_reason is not None else update))
        for context_id in (*output.started, *output.preempted):
            if context_id not in told and context_id in self._executions:
                state = str(self._engine.contexts[context_id].state)
                updates.append(to_list(Update(self._executions[context_id], context_id, state)))
        self._channel.send(Step(output.decision_id, updates))

    def _update(self, part: ContextOutput) -> Update:
        context = self._engine.contexts[part.context_id]
        num_top = context.sampling_params.logprobs
        return Update(
            self._executions[part.context_id],
            part.context_id,
            str(context.state),
            pack_ids(part.new_token_ids),
            b"" if num_top is None else pack(part.new_logprobs, num_top),
            context.text.delta(final=False) if context.is_streaming else "",
        )

    def _ending(self, update: Update) -> Update:
        context = self._engine.contexts[update.context_id]
        last_text = context.text.delta(final=True) if context.is_streaming else ""
        generation = self._engine.forget(update.context_id)
        del self._executions[update.context_id]
        vocabulary, params, error = self._engine.vocabulary, context.sampling_params, generation.error
        return replace(
            update,
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
        )
    )
    return engine  # type: ignore[no-any-return]


def main() -> int:
    """Serve the parent at file descriptor argv[1], whose process id is argv[2]."""
    die_with_parent(int(sys.argv[2]))
    for request in (signal.SIGINT, signal.SIGTERM):
        signal.signal(request, signal.SIG_IGN)  # a terminal or a supervisor signals the whole group; the parent answers
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    for message in channel.receive(wait=True):
        assert isinstance(message, Load)
        engine = load(channel, message)
        if engine is None:
            return 1
        EngineLoop(channel, engine).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
