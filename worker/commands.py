"""Hears rq's commands (`rq:pubsub:{worker}`) for the worker's loop: a thread that queues them and does nothing else.

Commands are rq's own: `stop-job`, `stop-execution`, `shutdown` and `kill-horse`. One that is published while the
connection is down is lost, as in rq.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from dataclasses import dataclass

import redis

from batonq.producer import keys
from batonq.worker.waker import Waker

#: Seconds of one wait for a message; `stop` takes no longer than this.
_WAIT_SECONDS = 0.5
#: Seconds until a lost server is asked again.
_RECONNECT_SECONDS = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Command:
    """One command. `job_id` and `execution_id` are empty where it has none."""

    name: str
    job_id: str = ""
    execution_id: str = ""


class CommandListener:
    """Makes `fileno()` readable once there are commands to `take`."""

    def __init__(self, url: str, worker: str) -> None:
        self._connection = redis.Redis.from_url(url, socket_timeout=10)
        self._channel = keys.pubsub(worker)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._waker = Waker()
        self._stopping = threading.Event()
        self._subscribed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="commands", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """For select."""
        return self._waker.fileno()

    def await_subscribed(self, seconds: float) -> bool:
        """Wait until commands are heard."""
        return self._subscribed.wait(seconds)

    def clear(self) -> None:
        """Forget past rings."""
        self._waker.clear()

    def take(self) -> list[Command]:
        """The commands that have come, oldest first."""
        taken = []
        while not self._commands.empty():
            taken.append(self._commands.get_nowait())
        return taken

    def _listen(self) -> None:
        while not self._stopping.is_set():
            try:
                with self._connection.pubsub() as channel:  # type: ignore[no-untyped-call]
                    channel.subscribe(self._channel)
                    while not self._stopping.is_set():
                        self._hear(channel.get_message(timeout=_WAIT_SECONDS))
            except redis.RedisError as error:
                logger.debug("commands: %s", error)
                self._stopping.wait(_RECONNECT_SECONDS)

    def _hear(self, message: dict[str, object] | None) -> None:
        if message is None:
            return
        if message["type"] == "subscribe":
            self._subscribed.set()
        elif message["type"] == "message":
            command = parse(message["data"])
            if command is None:
                logger.warning("a command that can't be read: %r", message["data"])
                return
            self._commands.put(command)
            self._waker.wake()

    def stop(self) -> None:
        """End the thread and close the connection."""
        self._stopping.set()
        self._thread.join()
        self._connection.close()
        self._waker.close()


def parse(data: object) -> Command | None:
    """A command as rq publishes it: a JSON object. None for anything else."""
    try:
        fields = json.loads(data) if isinstance(data, bytes | str) else None
    except ValueError:
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("command"), str):
        return None
    return Command(fields["command"], str(fields.get("job_id") or ""), str(fields.get("execution_id") or ""))
