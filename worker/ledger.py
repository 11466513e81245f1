"""The jobs that a worker owns and what it still has to tell the server about them.

Everything that must reach Redis is kept here until Redis has acknowledged it, so an outage loses nothing: requests wait
to be pinned, tokens and states to be committed, ends to be published. A `flush` takes one round trip for each
of the three, whatever the number of jobs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from batonq.producer.schema import FAILURE_TTL
from batonq.worker.owned import OwnedJob, Place
from batonq.worker.scripts import Committed, Ending, Loss, Ownership, Scripts

logger = logging.getLogger(__name__)


class Ledger:
    """Owned jobs by id, in order of claim, and unpublished ends. Methods raise redis.RedisError and can be repeated.

    `on_lost` is called with each job that turns out to be no longer ours.
    """

    def __init__(self, scripts: Scripts, place: Place, on_lost: Callable[[OwnedJob], None]) -> None:
        self._scripts = scripts
        self._place = place
        self._on_lost = on_lost
        self.jobs: dict[str, OwnedJob] = {}
        self._unpinned: list[OwnedJob] = []
        self._endings: list[Ending] = []
        self._losses: list[Loss] = []
        #: Published ends of jobs that have dependents, callbacks or webhooks, for whoever serves them: queue and id.
        self.follow_ups: list[tuple[str, str]] = []

    @property
    def num_contexts(self) -> int:
        """Contexts of the jobs that run."""
        return sum(len(job.contexts) for job in self.jobs.values())

    @property
    def settled(self) -> bool:
        """Whether the server knows everything."""
        said = not self._endings and not self._unpinned and not self._losses
        return said and not any(job.dirty for job in self.jobs.values())

    @property
    def run_ahead(self) -> int:
        """Tokens that the server has not acknowledged, the most of any context."""
        return max((job.run_ahead for job in self.jobs.values()), default=0)

    @property
    def owned(self) -> list[Ownership]:
        """The fences of all jobs, those included whose end is not published yet."""
        return [job.ownership for job in self.jobs.values()] + [ending.ownership for ending in self._endings]

    def begin(self, job: OwnedJob, *, pinned: bool) -> None:
        """Take in a newly claimed job; its request is written with the next flush unless an earlier owner did so."""
        if (earlier := self.jobs.get(job.job_id)) is not None:  # taken from us and given back before we knew
            self._lose(earlier)
        self.jobs[job.job_id] = job
        if not pinned:
            self._unpinned.append(job)

    def end(self, ending: Ending) -> None:
        """Publish an end with the next flush; the job is no longer among those that run."""
        job = self.jobs.get(ending.ownership.job_id)
        if job is not None and job.ownership == ending.ownership:
            del self.jobs[job.job_id]
        self._endings.append(ending)

    def flush(self) -> bool:
        """Tell the server everything, and find out what is no longer ours. True if a job was queued again."""
        self._pin()
        queued_again = self._commit() | self._publish()
        if self._losses:
            self._scripts.settle(self._place.worker, FAILURE_TTL, self._losses)
            self._losses = []
        return queued_again

    def _pin(self) -> None:
        if not self._unpinned:
            return
        now = time.time()
        batch = [(job.ownership, job.request.job.stream, job.pin_fields(self._place, now)) for job in self._unpinned]
        for job, done in zip(self._unpinned, self._scripts.pin(batch), strict=True):
            if not done:
                self._lose(job)
            for context in job.contexts:
                context.mirrored_state, context.mirrored_at = context.state, now
        self._unpinned = []

    def _commit(self) -> bool:
        """Commit what is new. Jobs without news are asked for too: that is how a canceled one is noticed soon."""
        jobs = list(self.jobs.values())
        if not jobs:
            return False
        now = time.time()
        outcomes = self._scripts.commit([(job.ownership, job.news(now)) for job in jobs])
        for job, outcome in zip(jobs, outcomes, strict=True):
            if outcome is Committed.DONE:
                for context in job.contexts:
                    context.acknowledge(now)
            elif outcome is Committed.LOST:
                self._lose(job)
        wrong = [job for job, outcome in zip(jobs, outcomes, strict=True) if outcome is Committed.CONTRADICTION]
        for job in wrong:
            self._give_up(job)
        return bool(wrong)

    def _publish(self) -> bool:
        if not self._endings:
            return False
        queued_again = False
        for ending, outcome in zip(self._endings, self._scripts.finish(self._endings), strict=True):
            job_id = ending.ownership.job_id
            if not outcome.done:
                logger.warning("%s: ended here, but it is no longer ours", job_id)
                names = [context.context_id for context in ending.contexts]
                self._losses.append(Loss(ending.ownership, ending.queue, names, ending.client_id))
            elif outcome.retried:
                logger.warning("%s: did not end well, and is queued again", job_id)
                queued_again = True
            elif outcome.follow_up:
                self.follow_ups.append((ending.queue, job_id))
        self._endings = []
        return queued_again

    def _lose(self, job: OwnedJob) -> None:
        if self.jobs.get(job.job_id) is job:
            logger.warning("%s: no longer ours", job.job_id)
            del self.jobs[job.job_id]
            self._losses.append(job.loss)
            self._on_lost(job)

    def _give_up(self, job: OwnedJob) -> None:
        """The server holds other tokens than we do. Its are the truth: let the job begin again from them."""
        logger.error("%s: the server holds other tokens than these", job.job_id)
        self.release([job], crashed=[job])
        self._on_lost(job)

    def release(self, jobs: Iterable[OwnedJob], *, crashed: Iterable[OwnedJob] = ()) -> None:
        """Give jobs back to the front of the queue, for whoever comes; the engine died in a step of those `crashed`."""
        batch = [job for job in jobs if self.jobs.get(job.job_id) is job]
        if batch:
            dead = {job.ownership for job in crashed}
            self._scripts.release(self._place.worker, [job.ownership for job in batch], crashed=dead)
        for job in batch:
            del self.jobs[job.job_id]
            if job in self._unpinned:
                self._unpinned.remove(job)
