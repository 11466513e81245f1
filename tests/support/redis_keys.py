"""What is left in Redis, and whether it will ever go."""

from __future__ import annotations

import redis
from rq import Queue
from rq.registry import CanceledJobRegistry, FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry

from batonq.producer import keys, serializer

#: Keys without a time to live: rq's sets of names, and its registries, whose members rq removes as they expire.
PERMANENT = ("queues", "workers", "workers:", "finished:", "failed:", "canceled:", "deferred:", "scheduled:", "wip:")


def forever(connection: redis.Redis) -> set[str]:
    """Keys that would stay for ever and are none of rq's permanent ones."""
    prefixes = tuple(f"{keys.PREFIX}:{name}" for name in PERMANENT)
    everything = [key.decode() for key in connection.scan_iter()]
    return {key for key in everything if connection.ttl(key) == -1 and not key.startswith(prefixes)}


def registries(connection: redis.Redis, queue: str, job_id: str) -> set[str]:
    """Names of the registries that list a job."""
    found = set()
    for kind in (FinishedJobRegistry, FailedJobRegistry, CanceledJobRegistry, StartedJobRegistry):
        registry = kind(queue=Queue(queue, connection=connection, serializer=serializer))
        if job_id in registry.get_job_ids(cleanup=False):
            found.add(kind.__name__.removesuffix("JobRegistry").lower())
    return found
