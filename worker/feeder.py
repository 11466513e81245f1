"""Feeds the engine's process: which owned jobs are in it, which wait to be, and what it says about them.

A job that was in the step in which the engine died is a suspect: it runs alone until it makes progress, one suspect
after the other, while the rest keep their places. So a job that kills the engine each time takes no neighbour along.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from itertools import count

from batonq.worker.engine_process import EngineProcess
from batonq.worker.messages import Abort, Add, Pause, Resume, Step, Update, pack_ids, unpack_ids
from batonq.worker.owned import OwnedContext, OwnedJob


class Feeder:
    """Owned jobs on their way into one ready engine process and out of it."""

    def __init__(self, engine: EngineProcess) -> None:
        self.engine = engine
        self._waiting: deque[OwnedJob] = deque()
        self._inside: dict[str, OwnedJob] = {}
        self._next_number = count()
        #: Numbers of the contexts that the engine has, by id, and the contexts by number.
        self._numbers: dict[str, int] = {}
        self._running: dict[int, tuple[OwnedJob, OwnedContext]] = {}
        self._alone: OwnedJob | None = None
        self._paused = False
        #: Whether the engine has said that it is time to commit what it told; reset by who does so.
        self.commit_due = False
        #: When the engine last said that a step is done, or had nothing to do.
        self._heard_at = time.monotonic()

    @property
    def busy(self) -> bool:
        """Whether the engine steps, so that it will say when the next commit is due."""
        return bool(self._inside) and not self._paused

    @property
    def silent_seconds(self) -> float:
        """For how long the engine has been busy without finishing a step."""
        return time.monotonic() - self._heard_at if self.busy else 0.0

    def forgive_silence(self) -> None:
        """Begin to count anew: it was we who didn't listen."""
        self._heard_at = time.monotonic()

    def pause(self) -> None:
        """Have the engine stop after the present step, and keep what it has."""
        if not self._paused:
            self._paused = True
            self.engine.send(Pause())

    def resume(self) -> None:
        """Have it go on."""
        if self._paused:
            self._paused = False
            self._heard_at = time.monotonic()
            self.engine.send(Resume())

    @property
    def in_step(self) -> list[OwnedJob]:
        """Jobs that the step held which the engine's death has interrupted."""
        return list(dict.fromkeys(self._running[n][0] for n in self.engine.in_step if n in self._running))

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
            job = self._waiting.popleft()
            suspect = job.crashes > 0
            if suspect:
                self._alone = job
            if not self._inside:
                self._heard_at = time.monotonic()
            self._inside[job.job_id] = job
            for context in job.contexts:
                number = self._numbers[context.context_id] = next(self._next_number)
                self._running[number] = job, context
                self.engine.send(
                    Add(
                        number,
                        context.context_id,
                        pack_ids(job.request.input_token_ids),
                        pack_ids(context.tokens),
                        bytes(context.logprobs),
                        context.sampling.model_dump(mode="json"),
                        job.request.job.priority,
                        context.streaming,
                        suspect,
                    )
                )

    def drop(self, job: OwnedJob) -> None:
        """Take a job out, wherever it is; the engine says no more about it."""
        if job in self._waiting:
            self._waiting.remove(job)
        if self._inside.get(job.job_id) is job:
            for context in job.contexts:
                number = self._numbers.pop(context.context_id, None)
                if number is not None:
                    del self._running[number]
                    self.engine.send(Abort(number, context.context_id))
            self._leave(job)

    def hear(self) -> Iterator[tuple[OwnedJob, Update]]:
        """Take in what the engine has said, without waiting; the jobs one of whose contexts has ended, and how.

        Late words about ownerships that were lost are left out.
        """
        for message in self.engine.receive():
            if isinstance(message, Step):
                self._heard_at = time.monotonic()
                self.commit_due |= message.due
                self._grow(message)
                yield from self._update(message)
                self._rehabilitate()

    def _grow(self, step: Step) -> None:
        for number, token_id in zip(unpack_ids(step.numbers), unpack_ids(step.token_ids), strict=True):
            if number in self._running:
                job, context = self._running[number]
                context.grow(token_id)
                if job.first_token_at is None:
                    job.first_token_at = step.ended_at

    def _update(self, step: Step) -> Iterator[tuple[OwnedJob, Update]]:
        for fields in step.updates:
            update = Update(*fields)
            if update.number not in self._running:
                continue
            job, context = self._running[update.number]
            job.take(context, update, step.ended_at)
            if update.finish_reason is not None:
                self._end(job, context)
                yield job, update

    def _rehabilitate(self) -> None:
        """A suspect that has made progress is none any more."""
        if self._alone is not None and self._alone.first_token_at is not None:
            self._alone = None
            self._dispatch()

    def _end(self, job: OwnedJob, context: OwnedContext) -> None:
        del self._running[self._numbers.pop(context.context_id)]
        if not any(other.context_id in self._numbers for other in job.contexts):
            self._leave(job)

    def _leave(self, job: OwnedJob) -> None:
        del self._inside[job.job_id]
        if self._alone is job:
            self._alone = None
        self._dispatch()
