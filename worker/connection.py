"""Connections of a worker that must hear soon when the server is away."""

from __future__ import annotations

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry


def connect(url: str, patience: float) -> redis.Redis:
    """A connection that waits `patience` seconds at most, for the server or for a reply, and sends nothing twice."""
    return redis.Redis.from_url(
        url, socket_timeout=patience, socket_connect_timeout=patience, retry=Retry(NoBackoff(), 0)
    )
