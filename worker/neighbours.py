"""The other workers of the same queues: who of them is dead, and what becomes of the jobs they leave.

Three signs: a lease that has lapsed; a process of this very machine that is gone, which shows at once; and an execution
whose worker has no lease at all, as after a server came back older than it was, if that stays so for a lease.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import redis
from rq.utils import as_text

from batonq.producer import keys
from batonq.producer.schema import FAILURE_TTL
from batonq.worker.lease import Watch
from batonq.worker.registration import Registration
from batonq.worker.scripts import Scripts

#: Looks in a lease.
_LOOKS = 16
#: Looks at processes and at executions without a lease, in a lease.
_ROUNDS = 4
#: Executions that one such look picks by chance.
_SAMPLE = 32

logger = logging.getLogger(__name__)


class Neighbours:
    """Looks after the neighbours of the worker `registration.name`. Methods raise redis.RedisError."""

    def __init__(
        self,
        connection: redis.Redis,
        scripts: Scripts,
        registration: Registration,
        queues: Sequence[str],
        lease_seconds: float,
    ) -> None:
        self._connection = connection
        self._scripts = scripts
        self._registration = registration
        self._queues = queues
        self._seconds = lease_seconds
        self._leases = {queue: Watch(lease_seconds) for queue in queues}
        self._orphans = {queue: Watch(lease_seconds) for queue in queues}
        self._next_round = 0.0

    @property
    def interval(self) -> float:
        """Seconds from one look to the next."""
        return self._seconds / _LOOKS

    def look(self) -> int:
        """Take over what can be; how many jobs are queued again."""
        now = time.monotonic()
        a_round = now >= self._next_round
        if a_round:
            self._next_round = now + self._seconds / _ROUNDS
        taken = 0
        for queue in self._queues:
            counters = self._counters(queue)
            for name, counter in self._leases[queue].lapsed(counters).items():
                taken += self._take_over(queue, name, counter, why="its lease has lapsed")
            if a_round:
                taken += self._take_orphans(queue, counters.keys() | {self._registration.name})
        if a_round:
            for name in self._registration.dead_on_this_machine():
                held = self._connection.hget(keys.lease(self._queues[0]), name)
                taken += self._take_over(
                    self._queues[0], name, None if held is None else as_text(held), why="its process is gone"
                )
        return taken

    def _counters(self, queue: str) -> dict[str, str]:
        found = {
            as_text(name): as_text(counter) for name, counter in self._connection.hgetall(keys.lease(queue)).items()
        }
        found.pop(self._registration.name, None)
        return found

    def _take_orphans(self, queue: str, known: set[str]) -> int:
        """Executions by workers without a lease: all there are, or as many as a look picks."""
        picked: Any = self._connection.zrandmember(keys.started(queue), _SAMPLE)
        members = [as_text(member) for member in picked]
        owners = {}
        for member in members:
            name = self._connection.hget(keys.job(member.rpartition(":")[0]), "worker_name")
            if name is not None and (owner := as_text(name)) not in known:
                owners[member] = owner
        lapsed = self._orphans[queue].lapsed(owners)
        return sum(
            self._take_over(queue, name, None, [member], why="it has no lease") for member, name in lapsed.items()
        )

    def _take_over(self, queue: str, name: str, counter: str | None, members: Sequence[str] = (), *, why: str) -> int:
        left = self._registration.executions_of(name)
        taken = self._scripts.reap(queue, name, counter, members)
        if taken is None:
            return 0
        self._scripts.settle(name, FAILURE_TTL, left)
        self._registration.bury(name)
        logger.warning("worker %s is dead, %s; %d of its jobs are queued again", name, why, len(taken))
        return len(taken)
