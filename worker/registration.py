"""The worker as rq's tools see it: its hash, its place in the sets of workers, its heartbeat.

Written by hand to rq 3.0's layout instead of through `rq.worker.BaseWorker`, which leans on signal handlers, death
penalties and a socket timeout of its own. The hash also says which process it is, so that a worker starting on the same
machine can tell at once that another one is dead.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import redis
from rq.utils import as_text
from rq.version import VERSION as RQ_VERSION

from batonq.producer import keys
from batonq.worker.scripts import Loss, Ownership, iso

#: Seconds without a heartbeat after which rq counts a worker as gone. rq's default.
WORKER_TTL = 420

_PROCESS_FIELD = "batonq_process"


def process_identity(pid: int) -> str | None:
    """Names a process beyond doubt: boot, pid namespace, pid and start time. None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        namespace = Path("/proc/self/ns/pid").readlink()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *numbers = stat.rpartition(")")[2].split()
    if state in ("Z", "X"):
        return None
    return f"{boot} {namespace} {pid} {numbers[18]}"


def _is_dead(identity: str) -> bool:
    """Whether a process of this machine (boot and pid namespace) is known to be gone."""
    own = process_identity(os.getpid())
    assert own is not None
    words = identity.split(" ")
    if len(words) != 4 or not words[2].isdigit():  # not ours
        return False
    return own.split(" ")[:2] == words[:2] and process_identity(int(words[2])) != identity


class Registration:
    """One worker's records in Redis."""

    def __init__(self, connection: redis.Redis, name: str, queues: Sequence[str]) -> None:
        self._connection = connection
        self.name = name
        self._queues = queues
        self._key = keys.worker(name)
        self._state = "idle"

    def birth(self) -> None:
        """Enter the worker into rq's books."""
        now = iso(time.time())
        with self._connection.pipeline() as pipeline:
            pipeline.delete(self._key)
            pipeline.hset(
                self._key,
                mapping={
                    "birth": now,
                    "last_heartbeat": now,
                    "queues": ",".join(self._queues),
                    "pid": os.getpid(),
                    "hostname": socket.gethostname(),
                    "ip_address": "unknown",
                    "version": RQ_VERSION,
                    "python_version": sys.version,
                    "state": self._state,
                    _PROCESS_FIELD: process_identity(os.getpid()) or "",
                },
            )
            pipeline.expire(self._key, WORKER_TTL + 60)
            pipeline.persist(keys.worker_executions(self.name))
            pipeline.sadd(keys.WORKERS, self._key)
            for queue in self._queues:
                pipeline.sadd(keys.workers_of_queue(queue), self._key)
            pipeline.execute()

    def show(self, state: str) -> None:
        """Have rq's tools show the worker as "idle", "busy" or "suspended"."""
        if state != self._state:
            with self._connection.pipeline() as pipeline:
                pipeline.hset(self._key, "state", state)
                pipeline.expire(self._key, WORKER_TTL + 60)
                pipeline.execute()
            self._state = state

    def heartbeat(self, owned: list[Ownership]) -> None:
        """Renew the records of the worker and of what it runs."""
        birth, death = self._connection.hmget(self._key, "birth", "death")
        if birth is None or death is not None:  # it expired in a long outage, or a neighbour took us for dead
            self.birth()
        now = time.time()
        with self._connection.pipeline(transaction=False) as pipeline:
            pipeline.hset(self._key, mapping={"last_heartbeat": iso(now), "state": self._state})
            pipeline.expire(self._key, WORKER_TTL + 60)
            for owner in owned:
                execution = keys.execution(owner.job_id, owner.execution_id)
                pipeline.hset(execution, "last_heartbeat", now)
                pipeline.expire(execution, WORKER_TTL)
                pipeline.expire(keys.executions(owner.job_id), WORKER_TTL)
            pipeline.execute()

    def death(self) -> None:
        """Strike the worker out; its hash stays for a minute."""
        self._strike(self.name)

    def _strike(self, name: str) -> None:
        key = keys.worker(name)
        served = as_text(self._connection.hget(key, "queues") or "").split(",")
        with self._connection.pipeline() as pipeline:
            pipeline.srem(keys.WORKERS, key)
            for queue in dict.fromkeys([*self._queues, *served]):
                pipeline.srem(keys.workers_of_queue(queue), key)
            pipeline.hset(key, "death", iso(time.time()))
            pipeline.expire(key, 60)
            pipeline.expire(keys.worker_executions(name), WORKER_TTL)  # what is left was nobody's
            pipeline.execute()

    def suspended(self) -> bool:
        """Whether somebody ran `rq suspend`."""
        return bool(self._connection.exists(keys.SUSPENDED))

    def dead_on_this_machine(self) -> list[str]:
        """Names of workers of these queues that are registered and whose process is known to be gone."""
        prefix = keys.worker("")
        members = self._connection.sunion([keys.workers_of_queue(queue) for queue in self._queues])
        names = sorted({as_text(member).removeprefix(prefix) for member in members} - {self.name})
        identities = [(name, self._connection.hget(keys.worker(name), _PROCESS_FIELD)) for name in names]
        return [name for name, identity in identities if identity and _is_dead(as_text(identity))]

    def executions_of(self, name: str) -> list[Loss]:
        """What a worker owns by the server's books, oldest claim first; jobs that are gone come first of all."""
        found = []
        for member in self._connection.smembers(keys.worker_executions(name)):
            job_id, _, execution_id = as_text(member).rpartition(":")
            fields = ("batonq_epoch", "started_at", "origin", "batonq_n")
            epoch, started, origin, n = self._connection.hmget(keys.job(job_id), *fields)
            owner = Ownership(job_id, execution_id, int(epoch or 0))
            loss = Loss(owner, as_text(origin or self._queues[0]), keys.context_ids(job_id, int(n or 1)), None)
            found.append((started or b"", job_id, loss))
        return [loss for _, _, loss in sorted(found, key=lambda entry: entry[:2])]

    def is_alive(self, name: str) -> bool:
        """Whether a worker is registered and not known to be dead."""
        identity, death = self._connection.hmget(keys.worker(name), _PROCESS_FIELD, "death")
        return identity is not None and death is None and not (identity and _is_dead(as_text(identity)))

    def bury(self, name: str) -> None:
        """Strike a dead worker out."""
        self._strike(name)
