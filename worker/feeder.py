"""Feeds the engine's process: which owned jobs are in it, which wait to be, and what it says about them.

A job that was in the engine when it died is a suspect: it runs alone until it makes progress, so that a job that kills
the engine each time takes no neighbour with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from batonq.worker.engine_process import EngineProcess
from batonq.worker.messages import Abort, Add, Step, Update, pack_ids
from batonq.worker.owned import OwnedContext, OwnedJob


class Feeder:
    """Owned jobs on their way into one ready engine process and out of it."""

    def __init__(self, engine: EngineProcess) -> None:
        self.engine = engine
        self._waiting: deque[OwnedJob] = deque()
        self._inside: dict[str, OwnedJob] = {}
        #: The contexts that the engine has, by id.
        self._running: dict[str, tuple[OwnedJob, OwnedContext]] = {}
        self._alone: OwnedJob | None = None

    @property
    def inside(self) -> list[OwnedJob]:
        """Jobs that the engine has, oldest first."""
        return list(self._inside.values())

    @property
    def waiting(self) -> list[OwnedJob]:
        """Jobs that the engine doesn't have yet, next first."""
        return list(self._waiting)

    def put(self, job: OwnedJob) -> None:
        """Line a job up, and hand over what can go."""
        self._waiting.append(job)
        self._dispatch()

    def _dispatch(self) -> None:
        while self._waiting and self._alone is None:
            suspect = self._waiting[0].crashes > 0
            if suspect and self._inside:
                return
            job = self._waiting.popleft()
            if suspect:
                self._alone = job
            self._inside[job.job_id] = job
            for context in job.contexts:
                self._running[context.context_id] = job, context
                self.engine.send(
                    Add(
                        job.ownership.execution_id,
                        context.context_id,
                        pack_ids(job.request.input_token_ids),
                        pack_ids(context.tokens),
                        bytes(context.logprobs),
                        context.sampling.model_dump(mode="json"),
                        job.request.job.priority,
                        context.streaming,
                    )
                )

    def drop(self, job: OwnedJob) -> None:
        """Take a job out, wherever it is; the engine says no more about it."""
        if job in self._waiting:
            self._waiting.remove(job)
        if self._inside.get(job.job_id) is job:
            for context in job.contexts:
                if context.context_id in self._running:
                    del self._running[context.context_id]
                    self.engine.send(Abort(job.ownership.execution_id, context.context_id))
            self._leave(job)

    def updates(self) -> Iterator[tuple[OwnedJob, OwnedContext, Update]]:
        """What the engine has said, without waiting. Late words about ownerships that were lost are left out."""
        for message in self.engine.receive():
            if not isinstance(message, Step):
                continue
            for fields in message.updates:
                update = Update(*fields)
                job, context = self._running.get(update.context_id, (None, None))
                if job is None or context is None or job.ownership.execution_id != update.execution_id:
                    continue
                if update.finish_reason is not None:
                    self._end(job, context)
                elif update.new_token_ids and self._alone is job:
                    self._alone = None
                    self._dispatch()
                yield job, context, update

    def _end(self, job: OwnedJob, context: OwnedContext) -> None:
        del self._running[context.context_id]
        if not any(other.context_id in self._running for other in job.contexts):
            self._leave(job)

    def _leave(self, job: OwnedJob) -> None:
        del self._inside[job.job_id]
        if self._alone is job:
            self._alone = None
        self._dispatch()
