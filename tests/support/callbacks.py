"""Functions that jobs of tests name as their callbacks. Each notes in the list `called` what it was given."""

from __future__ import annotations

from typing import Any

import redis
from rq.job import Job

CALLED = "called"


def on_success(job: Job, connection: redis.Redis, result: Any) -> None:
    connection.rpush(CALLED, f"success {job.id} {len(result['choices'])}")


def on_failure(job: Job, connection: redis.Redis, kind: type, error: BaseException, _traceback: None) -> None:
    connection.rpush(CALLED, f"failure {job.id} {kind.__name__} {str(error).split(':')[0]}")


def on_stopped(job: Job, connection: redis.Redis) -> None:
    connection.rpush(CALLED, f"stopped {job.id}")


def broken(_job: Job, _connection: redis.Redis, _result: Any) -> None:
    raise ValueError("a callback of the user's")
