"""Where a worker's jobs come from: its queues in strict order, a doorbell for each, and rq's suspension of all."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence

from batonq.worker.doorbell import Doorbell
from batonq.worker.registration import WORKER_TTL
from batonq.worker.scripts import Abilities, Claim, Scripts, SetAside

#: Jobs asked for in one claim.
CLAIM_BATCH = 64

logger = logging.getLogger(__name__)


class Intake:
    """Claims jobs. Knows whether asking is worth it: after a ring it is, after an empty answer it isn't."""

    def __init__(
        self, scripts: Scripts, redis_url: str, worker: str, queues: Sequence[str], can: Abilities, grace: float
    ) -> None:
        """`grace`: seconds for which a job that prefers other numerics than this worker's waits for them."""
        self._scripts = scripts
        self._worker = worker
        self._queues = queues
        self._can = can
        self._grace = grace
        self.doorbells = [Doorbell(redis_url, queue) for queue in queues]
        #: Whether a queue may have jobs.
        self.promising = True
        #: Whether somebody ran `rq suspend`, as far as is known; nothing is claimed then.
        self.suspended = False

    def ring(self) -> None:
        """Ask again: a queue may have got jobs."""
        self.promising = True

    def claim(self, room: int) -> list[Claim]:
        """While `promising`: take jobs for so many contexts, as if each had one.

        If there are fewer, wait for the bells.
        """
        if self.suspended or room <= 0:
            return []
        wanted = min(room, CLAIM_BATCH)
        executions = [uuid.uuid4().hex for _ in range(wanted)]
        found = self._scripts.claim(self._queues, self._worker, self._can, executions, time.time(), WORKER_TTL)
        self.suspended = found is None
        if found is None:
            return []
        for job in found.aside:
            self._tell(job)
        self.promising = len(found.claims) == wanted
        if not self.promising:
            for doorbell in self.doorbells:
                doorbell.arm()
        return found.claims

    def recall(self) -> None:
        """Bring back what was set aside and can go on here."""
        for queue in self._queues:
            if back := self._scripts.recall(queue, self._can, self._grace):
                logger.info("%d jobs that had been left aside go on here: %s", len(back), ", ".join(back))
                self.ring()

    def _tell(self, job: SetAside) -> None:
        if job.reason == "schema":
            logger.warning(
                "%s: written by a newer version, which this one (schema %d) can't read; left for a newer worker",
                job.job_id,
                self._can.reader,
            )
        elif job.reason == "weights":
            logger.warning(
                "%s: has tokens that other weights made than ours; left for a worker that has them, for %g s",
                job.job_id,
                self._grace,
            )
        else:
            logger.warning(
                "%s: has tokens of other numerics than ours (%s); left for a worker of its own, if it prefers one for "
                "%g s at most",
                job.job_id,
                self._can.numerics_id,
                self._grace,
            )

    def stop(self) -> None:
        """End the doorbells."""
        for doorbell in self.doorbells:
            doorbell.stop()
