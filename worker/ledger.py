"""The jobs that a worker owns and what it still has to tell the server about them.

Everything that must reach Redis is kept here until Redis has acknowledged it, so an outage loses nothing: requests wait
to be pinned, tokens and states to be committed, ends to be published. A `flush` takes one round trip for each
of the three, whatever the number of jobs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from batonq.worker.owned import OwnedJob, Place
from batonq.worker.scripts import Committed, Ending, Ownership, Scripts

logger = logging.getLogger(__name__)


class Ledger:
    """Owned jobs by id, in order of claim, and unpublished ends. Methods raise redis.RedisError and can be repeated."""

    def __init__(self, scripts: Scripts, place: Place) -> None:
        self._scripts = scripts
        self._place = place
        self.jobs: dict[str, OwnedJob] = {}
        self._unpinned: list[OwnedJob] = []
        self._endings: list[Ending] = []

    @property
    def settled(self) -> bool:
        """Whether the server knows everything."""
        return not self._endings and not self._unpinned and not any(job.dirty for job in self.jobs.values())

    @property
    def owned(self) -> list[Ownership]:
        """The fences of all jobs, those included whose end is not published yet."""
        return [job.ownership for job in self.jobs.values()] + [ending.ownership for ending in self._endings]

    def find(self, job_id: str, execution_id: str) -> OwnedJob | None:
        """The job, if this very ownership of it is still ours."""
        job = self.jobs.get(job_id)
        return job if job is not None and job.ownership.execution_id == execution_id else None

    def begin(self, job: OwnedJob, *, pinned: bool) -> None:
        """Take in a newly claimed job; its request is written with the next flush unless an earlier owner did so."""
        self.jobs[job.job_id] = job
        if not pinned:
            self._unpinned.append(job)

    def end(self, ending: Ending) -> None:
        """Publish an end with the next flush; the job is no longer among those that run."""
        self.jobs.pop(ending.ownership.job_id, None)
        self._endings.append(ending)

    def flush(self) -> list[OwnedJob]:
        """Tell the server everything. Returns jobs that turned out to be no longer ours."""
        lost = self._pin() + self._commit()
        self._publish()
        return lost

    def _pin(self) -> list[OwnedJob]:
        if not self._unpinned:
            return []
        now = time.time()
        outcomes = self._scripts.pin([(job.ownership, job.pin_fields(self._place, now)) for job in self._unpinned])
        lost = [job for job, done in zip(self._unpinned, outcomes, strict=True) if not done]
        self._unpinned = []
        for job in lost:
            self._lose(job)
        return lost

    def _commit(self) -> list[OwnedJob]:
        dirty = [job for job in self.jobs.values() if job.dirty]
        if not dirty:
            return []
        now = time.time()
        lengths = [len(job.tokens) for job in dirty]
        batch = [(job.ownership, job.num_committed, job.uncommitted(), job.fields(now)) for job in dirty]
        lost = []
        for job, length, outcome in zip(dirty, lengths, self._scripts.commit(batch), strict=True):
            if outcome is Committed.DONE:
                job.num_committed = length
                job.dirty = False
            else:
                if outcome is Committed.CONTRADICTION:
                    logger.error(
                        "%s: the server holds other tokens than these %d; giving the job up", job.job_id, length
                    )
                self._lose(job)
                lost.append(job)
        return lost

    def _publish(self) -> None:
        if not self._endings:
            return
        outcomes = self._scripts.finish(self._endings)
        for ending, (done, _) in zip(self._endings, outcomes, strict=True):
            if not done:
                logger.warning("%s: ended here, but another worker owns it by now", ending.ownership.job_id)
        self._endings = []

    def _lose(self, job: OwnedJob) -> None:
        logger.warning("%s: no longer ours", job.job_id)
        if self.jobs.get(job.job_id) is job:
            del self.jobs[job.job_id]

    def release(self, jobs: Iterable[OwnedJob], *, crashed: bool) -> None:
        """Give jobs back to the front of the queue, for whoever comes."""
        batch = [job for job in jobs if self.jobs.get(job.job_id) is job]
        if batch:
            self._scripts.release(self._place.worker, [job.ownership for job in batch], crashed=crashed)
        for job in batch:
            del self.jobs[job.job_id]
