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
_LOOKS = 32
#: Looks at the processes of this machine, in a lease.
_ROUNDS = 4
#: Executions that are picked by chance, once in a lease, to see whether their workers have one.
_SAMPLE = 128

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
        #: Executions that have been found without a lease, and since when: job id:execution id → worker, moment.
        self._orphans: dict[str, dict[str, tuple[str, float]]] = {queue: {} for queue in queues}
        self._next_round = self._next_sample = 0.0

    @property
    def interval(self) -> float:
        """Seconds from one look to the next."""
        return self._seconds / _LOOKS

    def look(self) -> int:
        """Take over what can be; how many jobs are queued again."""
        now, taken = time.monotonic(), 0
        sample = now >= self._next_sample
        for queue in self._queues:
            counters = self._counters(queue)
            for name, counter in self._leases[queue].lapsed(counters).items():
                taken += self._take_over(queue, name, counter, why="its lease has lapsed")
            if sample:
                taken += self._take_orphans(queue, counters.keys() | {self._registration.name})
        if sample:
            self._next_sample = now + self._seconds
        if now >= self._next_round:
            self._next_round = now + self._seconds / _ROUNDS
            taken += self._take_from_dead_processes(self._queues[0])
        return taken

    def _take_from_dead_processes(self, queue: str) -> int:
        taken = 0
        for name in self._registration.dead_on_this_machine():
            held = self._connection.hget(keys.lease(queue), name)
            counter = None if held is None else as_text(held)
            taken += self._take_over(queue, name, counter, why="its process is gone")
        return taken

    def _counters(self, queue: str) -> dict[str, str]:
        found = {
            as_text(name): as_text(counter) for name, counter in self._connection.hgetall(keys.lease(queue)).items()
        }
        found.pop(self._registration.name, None)
        return found

    def _take_orphans(self, queue: str, known: set[str]) -> int:
        """Take over executions whose workers have had no lease for a whole one; each look picks some by chance."""
        now, orphans = time.monotonic(), self._orphans[queue]
        picked: Any = self._connection.zrandmember(keys.started(queue), _SAMPLE)
        members = list({*map(as_text, picked), *orphans})
        for member, owner in zip(members, self._owners(members), strict=True):
            if owner is None or owner in known:
                orphans.pop(member, None)
            elif orphans.get(member, ("",))[0] != owner:
                orphans[member] = owner, now
        taken = 0
        for member, (owner, since) in list(orphans.items()):
            if now - since >= self._seconds:
                taken += self._take_over(queue, owner, None, [member], why="it has no lease")
                del orphans[member]
        return taken

    def _owners(self, members: Sequence[str]) -> list[str | None]:
        """The workers that run these executions, as far as their jobs say so too."""
        with self._connection.pipeline(transaction=False) as pipeline:
            for member in members:
                pipeline.hmget(keys.job(member.rpartition(":")[0]), "worker_name", "batonq_execution")
            rows = pipeline.execute()
        return [
            as_text(name) if name and execution and member.endswith(f":{as_text(execution)}") else None
            for member, (name, execution) in zip(members, rows, strict=True)
        ]

    def _take_over(self, queue: str, name: str, counter: str | None, members: Sequence[str] = (), *, why: str) -> int:
        left = self._registration.executions_of(name)
        taken = self._scripts.reap(queue, name, counter, members)
        if taken is None:
            return 0
        self._scripts.settle(name, FAILURE_TTL, left)
        self._registration.bury(name)
        logger.warning("worker %s is dead, %s; %d of its jobs are queued again", name, why, len(taken))
        return len(taken)
