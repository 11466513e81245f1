"""Leases: this worker's own, renewed by a thread that nothing else can hold up, and a watch over the others'.

A lease is a counter in the hash `keys.lease(queue)`, a field for each worker. Its owner bumps it; whoever else serves
the queue notes when it last saw it change. A counter that hasn't changed for a lease by the watcher's own monotonic
clock has lapsed, and the jobs of its worker are taken over. No wall clock is compared, neither with another machine's
nor with the server's.

An owner that can't renew must stop before anybody may take over: its lease holds for less than what others wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import redis

from batonq.producer import keys
from batonq.worker.connection import connect
from batonq.worker.registration import WORKER_TTL
from batonq.worker.waker import Waker

#: Renewals in a lease.
_RENEWALS = 4
#: Part of a lease after which a worker that couldn't renew stops.
_HOLDS = 0.7

logger = logging.getLogger(__name__)


class Lease:
    """Renews a worker's counters on a connection of its own; readable when it begins or ceases to hold."""

    def __init__(self, url: str, worker: str, queues: Sequence[str], seconds: float) -> None:
        self._interval = seconds / _RENEWALS
        self._connection = connect(url, self._interval)
        self._worker = worker
        self._queues = queues
        self._holds_for = seconds * _HOLDS
        self._held_until = 0.0
        self._waker = Waker()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def start(self) -> None:
        """Renew once, which raises redis.RedisError if the server can't be asked, and go on in the background."""
        self._renew()
        self._thread.start()

    @property
    def held(self) -> bool:
        """Whether nobody can have taken over what this worker owns."""
        return time.monotonic() < self._held_until

    def fileno(self) -> int:
        """For select."""
        return self._waker.fileno()

    def clear(self) -> None:
        """Forget past changes."""
        self._waker.clear()

    def _keep(self) -> None:
        was_held = True
        while not self._stopping.wait(self._interval):
            try:
                self._renew()
            except redis.RedisError as error:
                logger.debug("lease: %s", error)
            if self.held != was_held:
                was_held = self.held
                self._waker.wake()

    def _renew(self) -> None:
        asked = time.monotonic()
        with self._connection.pipeline(transaction=False) as pipeline:
            for queue in self._queues:
                pipeline.hincrby(keys.lease(queue), self._worker, 1)
                pipeline.expire(keys.lease(queue), WORKER_TTL)
            pipeline.execute()
        self._held_until = asked + self._holds_for

    def give_up(self) -> None:
        """Leave nothing that could lapse, now that nothing is owned any more. Raises redis.RedisError."""
        self._end_thread()
        for queue in self._queues:
            self._connection.hdel(keys.lease(queue), self._worker)

    def _end_thread(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def stop(self) -> None:
        """End the thread; who has not `given up` the lease leaves it to lapse."""
        self._end_thread()
        self._connection.close()
        self._waker.close()


class Watch:
    """Sees when what should change doesn't: values by key, and since when each has been what it is."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._seen: dict[str, tuple[str, float]] = {}
        self._looked_at = clock()

    def lapsed(self, values: Mapping[str, str]) -> dict[str, str]:
        """Those of these that have been what they are for `seconds`, as far as this watch has looked.

        What isn't among them any more is forgotten. If the watch didn't look for a while, since its own process stood
        still or the server was away, nobody could have been seen renewing: then all of it begins anew.
        """
        now = self._clock()
        if now - self._looked_at > self._seconds / _RENEWALS:
            self._seen.clear()
        self._looked_at = now
        self._seen = {
            key: seen if (seen := self._seen.get(key)) is not None and seen[0] == value else (value, now)
            for key, value in values.items()
        }
        return {key: value for key, (value, since) in self._seen.items() if now - since >= self._seconds}
