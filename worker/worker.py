"""The worker's parent process: claims jobs, feeds the engine's process, mirrors what it does, publishes results.

    queue ──claim──▶ feeder ──Add──▶ engine process ──Step──▶ ledger ──commit, finish──▶ Redis

One thread, one loop. It sleeps until the engine says something, the doorbell rings, a signal comes or a timer is due.
"""

from __future__ import annotations

import logging
import selectors
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import OutOfMemoryError, ReadOnlyError

from batonq.engine.limits import Limits
from batonq.producer.schema import ErrorInfo
from batonq.worker.doorbell import Doorbell
from batonq.worker.engine_process import EngineProcess, start_engine
from batonq.worker.feeder import Feeder
from batonq.worker.ledger import Ledger
from batonq.worker.messages import Ready, Stop, Update
from batonq.worker.owned import OwnedJob, Place, refuse
from batonq.worker.registration import WORKER_TTL, Registration
from batonq.worker.requests import Frontend, RefusedJob, RequestReader
from batonq.worker.scripts import Claim, Scripts
from batonq.worker.signals import StopRequests

#: Seconds between commits of tokens and states.
COMMIT_INTERVAL = 0.05
HEARTBEAT_INTERVAL = 15.0
#: Longest sleep of the loop, in seconds; also how often an idle worker looks whether rq was resumed.
IDLE_INTERVAL = 1.0
#: Seconds after which a lost server is asked again.
RECONNECT_INTERVAL = 1.0
#: Seconds that a stopping engine has for its last step.
STOP_SECONDS = 30.0
#: A job that was in the engine at this many of its deaths, without progress in between, is failed.
MAX_CRASHES = 3
#: Jobs asked for in one claim.
CLAIM_BATCH = 64

#: The server is away, or can't be written to for now: what was to be said is kept and said later.
OUTAGE = (redis.ConnectionError, redis.TimeoutError, OutOfMemoryError, ReadOnlyError)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a worker is started with. `engine` is a module with `load_engine`, which the engine's process calls."""

    redis_url: str
    queue: str
    name: str
    engine: str
    engine_options: dict[str, Any]
    load_frontend: Callable[[str], Frontend]
    #: End when the queue is empty and all claimed jobs are done.
    burst: bool = False


def run_worker(options: WorkerOptions) -> None:
    """Work until SIGINT or SIGTERM; in burst mode, until the queue is empty.

    Raises ModelUnavailable or EngineUnavailable if there is no engine to be had, and redis.RedisError if the server
    can't be reached at the start.
    """
    with StopRequests() as stops:
        connection = redis.Redis.from_url(options.redis_url, socket_timeout=10)
        connection.ping()
        started = start_engine(options.engine, options.engine_options, stops)
        if started is None:
            return
        worker = Worker(options, connection, stops, *started)
        try:
            worker.run()
        finally:
            worker.close()


class Worker:
    """A worker whose engine is ready."""

    def __init__(
        self,
        options: WorkerOptions,
        connection: redis.Redis,
        stops: StopRequests,
        engine: EngineProcess,
        ready: Ready,
    ) -> None:
        self._options = options
        self._stops = stops
        self._scripts = Scripts(connection)
        self._registration = Registration(connection, options.name, options.queue)
        self._doorbell = Doorbell(options.redis_url, options.queue)
        self._feeder = Feeder(engine)
        self._place = Place(options.name, options.queue, options.queue, ready.numerics_id)
        self._ledger = Ledger(self._scripts, self._place)
        limits = Limits(ready.max_model_len, ready.kv_cache_tokens, ready.vocab_size)
        self._reader = RequestReader(options.queue, options.load_frontend(ready.model_directory), limits)
        #: Jobs owned at once: those that the engine runs, and a few that are ready when one of them ends.
        self._capacity = ready.max_num_seqs + max(2, ready.max_num_seqs // 4)
        self._queue_may_have_jobs = True
        self._next_commit = self._next_heartbeat = self._next_contact = 0.0
        self._selector = selectors.DefaultSelector()
        for source in (self._doorbell, stops, engine):
            self._selector.register(source, selectors.EVENT_READ)

    def close(self) -> None:
        """End the engine's process and the doorbell, whatever state they are in."""
        self._feeder.engine.end(0)
        self._doorbell.stop()
        self._selector.close()

    def run(self) -> None:
        """Serve the queue until told to stop or, in burst mode, done; then give back what is not finished."""
        self._registration.birth()
        logger.info("worker %s serves queue %s", self._options.name, self._options.queue)
        while not self._stops.count and not self._done():
            self._sleep()
            self._hear_engine()
            self._contact_server()
            if self._feeder.engine.gone:
                self._replace_engine()
        self._wind_up()

    def _done(self) -> bool:
        idle = not self._ledger.jobs and self._ledger.settled
        return self._options.burst and idle and not self._queue_may_have_jobs

    def _sleep(self) -> None:
        now = time.monotonic()
        due = min(self._next_heartbeat, now + IDLE_INTERVAL)
        if not self._ledger.settled:
            due = min(due, self._next_commit)
        if self._queue_may_have_jobs and self._room > 0:
            due = now
        for key, _ in self._selector.select(max(0.0, max(due, self._next_contact) - now)):
            if key.fileobj is self._doorbell:
                self._doorbell.clear()
                self._queue_may_have_jobs = True

    # ── the server ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _contact_server(self) -> None:
        """Everything that is due at the server: ends and commits, heartbeats, claims. An outage only delays it."""
        now = time.monotonic()
        if now < self._next_contact:
            return
        try:
            if self._next_contact:
                self._after_outage()
            if now >= self._next_commit:
                self._next_commit = now + COMMIT_INTERVAL
                self._flush()
            if now >= self._next_heartbeat:
                self._next_heartbeat = now + HEARTBEAT_INTERVAL
                self._registration.heartbeat(self._ledger.owned, "busy" if self._ledger.jobs else "idle")
                self._recover()
            self._claim()
        except OUTAGE as error:
            logger.warning("the server can't be used, trying again in %g s: %s", RECONNECT_INTERVAL, error)
            self._next_contact = now + RECONNECT_INTERVAL

    def _flush(self) -> None:
        for lost in self._ledger.flush():
            self._feeder.drop(lost)

    def _after_outage(self) -> None:
        """Give back what a claim took whose reply was lost."""
        owned = set(self._ledger.owned)
        strays = [owner for owner in self._registration.executions_of(self._options.name) if owner not in owned]
        self._scripts.release(self._options.name, strays, crashed=False)
        self._next_contact = 0.0

    def _recover(self) -> None:
        """Give back what dead workers of this machine still own."""
        for name in self._registration.dead_on_this_machine():
            released = self._scripts.release(name, self._registration.executions_of(name), crashed=False)
            self._registration.bury(name)
            self._queue_may_have_jobs = True
            logger.warning("worker %s is dead; %d of its jobs are queued again", name, sum(released))

    @property
    def _room(self) -> int:
        return self._capacity - len(self._ledger.jobs)

    def _claim(self) -> None:
        if self._queue_may_have_jobs and self._room > 0:
            wanted = min(self._room, CLAIM_BATCH)
            executions = [uuid.uuid4().hex for _ in range(wanted)]
            claims = self._scripts.claim(self._options.queue, self._options.name, executions, time.time(), WORKER_TTL)
            self._queue_may_have_jobs = len(claims) == wanted
            for claim in claims:
                self._take_in(claim)
            self._flush()
        if not self._queue_may_have_jobs and self._room > 0:
            self._doorbell.arm()

    def _take_in(self, claim: Claim) -> None:
        """Read a claimed job and line it up, or end it here if it can't be run."""
        now = time.time()
        try:
            request, pinned = self._reader.read(claim)
        except RefusedJob as refused:
            self._ledger.end(refuse(claim, refused, self._place, now))
            return
        job = OwnedJob.begin(claim, request, self._place, now, resumed=pinned)
        self._ledger.begin(job, pinned=pinned)
        if job.crashes >= MAX_CRASHES:
            message = f"the engine died {job.crashes} times while it ran this job"
            self._ledger.end(job.fail(ErrorInfo(code="engine_crashed", message=message), self._place, now))
        else:
            self._feeder.put(job)

    # ── the engine ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _hear_engine(self) -> None:
        for job, update in self._feeder.updates():
            self._on_update(job, update)

    def _on_update(self, job: OwnedJob, update: Update) -> None:
        now = time.time()
        job.take(update, now)
        if update.error_code is not None:
            error = ErrorInfo(code=update.error_code, message=update.error_message or "", param=update.error_param)
            self._ledger.end(job.fail(error, self._place, now))
        elif update.finish_reason is not None:
            self._ledger.end(job.succeed(update, self._place, now))

    def _replace_engine(self) -> None:
        """The engine's process died: give back what it held, and start another."""
        dead = self._feeder
        self._selector.unregister(dead.engine)
        status = dead.engine.end()
        logger.error("the engine died with status %d; its %d contexts are queued again", status, len(dead.inside))
        self._insist(self._flush)
        # Those that only waited go in front: suspects run alone and would hold them up.
        self._insist(lambda: self._ledger.release(dead.inside, crashed=True))
        self._insist(lambda: self._ledger.release(dead.waiting, crashed=False))
        self._queue_may_have_jobs = True
        started = start_engine(self._options.engine, self._options.engine_options, self._stops)
        if started is not None:
            self._feeder = Feeder(started[0])
            self._selector.register(self._feeder.engine, selectors.EVENT_READ)

    def _insist(self, action: Callable[[], object]) -> None:
        """Repeat something that the server must hear until it has heard it. A second stop request gives up."""
        while self._stops.count < 2:
            try:
                action()
                return
            except OUTAGE as error:
                logger.warning("the server can't be used, trying again in %g s: %s", RECONNECT_INTERVAL, error)
                self._stops.wait(RECONNECT_INTERVAL)

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _wind_up(self) -> None:
        """Let the engine finish its step, tell the server everything, give back the rest."""
        engine = self._feeder.engine
        engine.send(Stop())
        deadline = time.monotonic() + STOP_SECONDS
        while not engine.gone and self._stops.count < 2 and (left := deadline - time.monotonic()) > 0:
            self._stops.clear()
            self._selector.select(left)
            self._doorbell.clear()
            self._hear_engine()
        self._insist(self._flush)
        rest = list(self._ledger.jobs.values())
        self._insist(lambda: self._ledger.release(rest, crashed=False))
        self._insist(self._registration.death)
        logger.info("worker %s stopped; %d unfinished jobs are queued again", self._options.name, len(rest))
