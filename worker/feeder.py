"""Feeds the engine's process: which owned jobs are in it, which wait to be, and what it says about them.

A job that was in the engine when it died is a suspect: it runs alone until it makes progress, so that a job that kills
the engine each time takes no neighbour with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from batonq.worker.engine_process import EngineProcess
from batonq.worker.messages import Abort, Add, Step, Update, pack_ids
from batonq.worker.owned import OwnedJob


class Feeder:
    """Owned jobs on their way into one ready engine process and out of it."""

    def __init__(self, engine: EngineProcess) -> None:
        self.engine = engine
        self._waiting: deque[OwnedJob] = deque()
        self._inside: dict[str, OwnedJob] = {}
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
            self.engine.send(
                Add(
                    job.ownership.execution_id,
                    job.job_id,
                    pack_ids(job.request.input_token_ids),
                    pack_ids(job.tokens),
                    job.request.sampling.model_dump(mode="json"),
                )
            )

    def drop(self, job: OwnedJob) -> None:
        """Take a job out, wherever it is; the engine says no more about it."""
        if job in self._waiting:
            self._waiting.remove(job)
        if self._inside.get(job.job_id) is job:
            self.engine.send(Abort(job.ownership.execution_id, job.job_id))
            self._leave(job)

    def updates(self) -> Iterator[tuple[OwnedJob, Update]]:
        """What the engine has said, without waiting. Late words about ownerships that were lost are left out."""
        for message in self.engine.receive():
            if not isinstance(message, Step):
                continue
            for fields in message.updates:
                update = Update(*fields)
                job = self._inside.get(update.context_id)
                if job is None or job.ownership.execution_id != update.execution_id:
                    continue
                if update.finish_reason is not None:
                    self._leave(job)
                elif update.new_token_ids and self._alone is job:
                    self._alone = None
                    self._dispatch()
                yield job, update

    def _leave(self, job: OwnedJob) -> None:
        del self._inside[job.job_id]
        if self._alone is job:
            self._alone = None
        self._dispatch()
