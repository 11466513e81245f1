"""What follows a job's end: dependents are queued, callbacks run, webhooks sent, rate limit slots given back.

All of it is rq's own code, in a thread of its own, since webhooks and callbacks may take a minute. The script that ends
a job notes in Redis (`keys.followups`) that something has to follow, and the note is struck out afterwards. So whatever
the worker's fate, each is done at least once: a worker takes over the notes of workers that are gone.

A callback is a function that a job names; it is run only where the operator allows that. A webhook is data.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Sequence

import redis
from rq import Queue
from rq.callbacks import execute_failure_callback, execute_stopped_callback, execute_success_callback
from rq.exceptions import NoSuchJobError
from rq.group import Group
from rq.job import Job, JobStatus
from rq.rate_limit import release_slot
from rq.registry import clean_registries
from rq.timeouts import TimerDeathPenalty
from rq.utils import as_text

from batonq.producer import keys, serializer
from batonq.producer.schema import FAILURE_TTL
from batonq.worker.registration import Registration
from batonq.worker.scripts import Scripts

#: Seconds between looks at what waits outside the queues: scheduled jobs, canceled ones, notes of dead workers.
SWEEP_INTERVAL = 1.0
#: Seconds between two runs of rq's own maintenance. rq's default.
MAINTENANCE_INTERVAL = 600.0

#: rq's name for the callback of each kind of end.
_CALLBACKS = {JobStatus.FINISHED: "success", JobStatus.FAILED: "failure", JobStatus.STOPPED: "stopped"}

logger = logging.getLogger(__name__)


class JobFailed(Exception):
    """What a failure callback is given: the job's error, as its result says it."""


class FollowUps:
    """The thread. `put` hands it the end of a job that was noted; `stop` waits until it is done with what it has."""

    def __init__(self, connection: redis.Redis, name: str, queues: Sequence[str], *, allow_callbacks: bool) -> None:
        self._connection = connection
        self._name = name
        self._queues = [Queue(each, connection=connection, serializer=serializer) for each in queues]
        self._allow_callbacks = allow_callbacks
        self._scripts = Scripts(connection)
        self._registration = Registration(connection, name, queues)
        self._ended: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._next_maintenance = 0.0
        #: Ends that an outage came in between of, and how many were handed over and served.
        self._put_off: list[tuple[str, str]] = []
        self._num_put = self._num_served = 0
        #: A worker of the same name may have left notes behind before us.
        self._inherits = True
        self._thread = threading.Thread(target=self._run, name="follow-ups", daemon=True)
        self._thread.start()

    @property
    def num_served(self) -> int:
        """Ends whose follow-ups are done."""
        return self._num_served

    @property
    def idle(self) -> bool:
        """Whether everything that was handed over is done."""
        return self._num_served == self._num_put

    def put(self, queue_name: str, job_id: str) -> None:
        """Do what follows this job's end."""
        self._num_put += 1
        self._ended.put((queue_name, job_id))

    def stop(self, seconds: float) -> None:
        """Let it finish, for so long; what is left is the next worker's to do."""
        self._ended.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            try:
                ended = self._ended.get(timeout=max(0.0, due - time.monotonic()))
                if ended is None:
                    return
                self._num_served += self._follow(*ended)
            except queue.Empty:
                due = time.monotonic() + SWEEP_INTERVAL
                self._sweep_or_say()

    def _sweep_or_say(self) -> None:
        try:
            self._sweep()
        except redis.RedisError as error:
            logger.debug("follow-ups: %s", error)

    def _sweep(self) -> None:
        put_off, self._put_off = self._put_off, []
        for ended in put_off:
            self._ended.put(ended)
        for each in self._queues:
            self._scripts.sweep(each.name, time.time(), FAILURE_TTL)
            each.ready_job_registry.cleanup()
            for job_id, worker in self._connection.hgetall(keys.followups(each.name)).items():
                ours = as_text(worker) == self._name
                if self._inherits if ours else not self._registration.is_alive(as_text(worker)):
                    self._follow(each.name, as_text(job_id))
        self._inherits = False
        if time.monotonic() >= self._next_maintenance:
            self._next_maintenance = time.monotonic() + MAINTENANCE_INTERVAL
            for each in self._queues:
                clean_registries(each)
            Group.clean_registries(self._connection)

    def _follow(self, queue_name: str, job_id: str) -> bool:
        """Everything that follows one job's end; then strike the note out. False if an outage put it off."""
        try:
            with contextlib.suppress(NoSuchJobError):
                self._serve(Job.fetch(job_id, connection=self._connection, serializer=serializer))
            self._connection.hdel(keys.followups(queue_name), job_id)
        except redis.RedisError as error:
            logger.warning("%s: what follows its end is put off: %s", job_id, error)
            self._put_off.append((queue_name, job_id))
            return False
        return True

    def _serve(self, job: Job) -> None:
        status = job.get_status(refresh=False)
        if status not in _CALLBACKS:
            return  # queued again meanwhile
        Queue(job.origin, connection=self._connection, serializer=serializer).enqueue_dependents(job)
        release_slot(job)
        latest = job.latest_result()
        reason = (latest.exc_string if latest is not None else None) or ""
        job.send_webhooks(status, exc_string=reason)
        name = as_text(self._connection.hget(job.key, f"{_CALLBACKS[status]}_callback_name") or "")
        if name and self._allow_callbacks:
            self._call_back(job, status, name, reason)
        elif name:
            logger.warning("%s: its callback %s is not run; that needs --allow-callbacks", job.id, name)

    def _call_back(self, job: Job, status: JobStatus, name: str, reason: str) -> None:
        try:
            if status is JobStatus.FINISHED:
                execute_success_callback(job, TimerDeathPenalty, job.return_value())
            elif status is JobStatus.FAILED:
                execute_failure_callback(job, TimerDeathPenalty, JobFailed, JobFailed(reason), None)
            else:
                execute_stopped_callback(job, TimerDeathPenalty)
        except Exception:  # a function of the user's may raise anything, and must not end this thread
            logger.exception("%s: its callback %s failed", job.id, name)
