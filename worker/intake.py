"""Where a worker's jobs come from: its queues in strict order, a doorbell for each, and rq's suspension of all."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from batonq.worker.doorbell import Doorbell
from batonq.worker.registration import WORKER_TTL
from batonq.worker.scripts import Claim, Scripts

#: Jobs asked for in one claim.
CLAIM_BATCH = 64


class Intake:
    """Claims jobs. Knows whether asking is worth it: after a ring it is, after an empty answer it isn't."""

    def __init__(self, scripts: Scripts, redis_url: str, worker: str, queues: Sequence[str]) -> None:
        self._scripts = scripts
        self._worker = worker
        self._queues = queues
        self.doorbells = [Doorbell(redis_url, queue) for queue in queues]
        #: Whether a queue may have jobs.
        self.promising = True
        #: Whether somebody ran `rq suspend`, as far as is known; nothing is claimed then.
        self.suspended = False

    def ring(self) -> None:
        """Ask again: a queue may have got jobs."""
        self.promising = True

    def claim(self, room: int) -> list[Claim]:
        """Take jobs for so many contexts, as if each had one; then wait for the bells if there were fewer."""
        if self.suspended or room <= 0:
            return []
        claims: list[Claim] | None = []
        if self.promising:
            wanted = min(room, CLAIM_BATCH)
            executions = [uuid.uuid4().hex for _ in range(wanted)]
            claims = self._scripts.claim(self._queues, self._worker, executions, time.time(), WORKER_TTL)
            self.suspended = claims is None
            self.promising = claims is None or len(claims) == wanted
        if not self.promising:
            for doorbell in self.doorbells:
                doorbell.arm()
        return claims or []

    def stop(self) -> None:
        """End the doorbells."""
        for doorbell in self.doorbells:
            doorbell.stop()
