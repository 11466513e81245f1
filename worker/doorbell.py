"""Wakes a worker when a job is queued on one of its queues, without taking it.

`BLMOVE q q LEFT LEFT` blocks until the queue has a job and puts it back where it was, in one step: nothing can be lost
between waking and claiming. It has a connection and a thread of its own, since it blocks, and waits only when told to,
since on a queue that has jobs it would spin. Each queue has a bell of its own: one that watched several would need
BLPOP, which takes the job.
"""

from __future__ import annotations

import logging
import threading

import redis

from batonq.producer import keys
from batonq.worker.waker import Waker

#: Seconds of one blocking call. Only an outage in the wrong moment makes `stop` wait that long.
_BLOCK_SECONDS = 2

logger = logging.getLogger(__name__)


class Doorbell:
    """Makes `fileno()` readable once a job is queued after `arm()`."""

    def __init__(self, url: str, queue: str) -> None:
        self._connection = redis.Redis.from_url(url, single_connection_client=True)
        self._client_id: int = self._connection.client_id()
        self._url = url
        self._queue = keys.queue(queue)
        self._waker = Waker()
        self._armed = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._wait, name="doorbell", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """For select."""
        return self._waker.fileno()

    def arm(self) -> None:
        """Begin to wait, if not waiting yet."""
        self._armed.set()

    def clear(self) -> None:
        """Forget past rings."""
        self._waker.clear()

    def _wait(self) -> None:
        while True:
            self._armed.wait()
            if self._stopping:
                return
            try:
                rung = self._connection.blmove(self._queue, self._queue, _BLOCK_SECONDS, "LEFT", "LEFT")
            except redis.RedisError as error:
                # The worker itself notices that the server is away, says so, and arms the bell again.
                logger.debug("doorbell: %s", error)
                rung = b"failed"
            if rung:
                self._armed.clear()
                self._waker.wake()

    def stop(self) -> None:
        """End the thread and close the connection."""
        self._stopping = True
        self._armed.set()
        try:
            with redis.Redis.from_url(self._url, socket_timeout=_BLOCK_SECONDS) as control:
                control.client_unblock(self._client_id)
        except redis.RedisError as error:
            logger.debug("doorbell: %s", error)
        self._thread.join()
        self._connection.close()
        self._waker.close()
