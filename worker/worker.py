"""The worker's parent process: claims jobs, feeds the engine's process, mirrors what it does, publishes results.

    queue ──claim──▶ feeder ──Add──▶ engine process ──Step──▶ ledger ──commit, finish──▶ Redis

One thread, one loop. It sleeps until the engine says that a commit is due or lacks contexts, the doorbell rings, a
signal comes or a timer is due. Other news of the engine wait in the socket.
"""

from __future__ import annotations

import logging
import math
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import redis
from redis.exceptions import OutOfMemoryError, ReadOnlyError

from batonq.engine.limits import Limits
from batonq.producer.schema import ErrorInfo
from batonq.worker.collector import spare_collector
from batonq.worker.commands import Command, CommandListener
from batonq.worker.connection import connect
from batonq.worker.doorbell import Doorbell
from batonq.worker.endings import fail, refuse, succeed
from batonq.worker.engine_process import EngineProcess, start_engine
from batonq.worker.feeder import Feeder
from batonq.worker.followups import FollowUps
from batonq.worker.intake import Intake
from batonq.worker.lease import Lease
from batonq.worker.ledger import Ledger
from batonq.worker.messages import Ready, Stop
from batonq.worker.neighbours import Neighbours
from batonq.worker.owned import OwnedJob, Place
from batonq.worker.registration import Registration
from batonq.worker.requests import CONTEXT_READER, Frontend, RefusedJob, RequestReader
from batonq.worker.scheduling import give_way
from batonq.worker.scripts import Abilities, Claim, Scripts
from batonq.worker.signals import StopRequests
from batonq.worker.timing import Timing

if TYPE_CHECKING:
    from _typeshed import HasFileno

#: Seconds between rq's heartbeats.
HEARTBEAT_INTERVAL = 15.0
#: Seconds between looks whether rq was suspended or resumed, and whether jobs that were set aside can go on.
LOOK_INTERVAL = 1.0
#: Seconds that the first subscription to commands may take.
SUBSCRIBE_SECONDS = 10.0
#: Seconds after which a lost server is asked again.
RECONNECT_INTERVAL = 1.0
#: Seconds that a stopping engine has for its last step.
STOP_SECONDS = 30.0
#: A job that was in a step at this many deaths of engines, without progress in between, is failed: the first time it
#: was in company, then alone. So is one that was owned by this many workers that vanished: many more, since it may just
#: have waited there.
MAX_CRASHES, MAX_LAPSES = 3, 50
#: Tokens of a context that may wait for a server that can't be reached; then the engine is paused.
MAX_RUN_AHEAD = 64

#: What a server answers that can't be written to, or not now: no room on its disk, no replicas, busy with a script …
REFUSALS = ("MISCONF", "NOREPLICAS", "BUSY", "MASTERDOWN", "TRYAGAIN", "CLUSTERDOWN", "LOADING")
#: Commit intervals after which a commit comes in the middle of a step, so that ends and cancellations that have nothing
#: to do with the engine needn't wait for the end of a long one.
MAX_SILENT_INTERVALS = 5
#: Seconds without a pass of the loop after which it was this process that stood still.
STOOD_STILL = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a worker is started with. `engine` is a module with `load_engine`, which the engine's process calls."""

    redis_url: str
    served_model_name: str
    #: In strict order: a job of a later one is taken when the earlier ones are empty.
    queues: tuple[str, ...]
    name: str
    engine: str
    engine_options: dict[str, Any]
    load_frontend: Callable[[str], Frontend]
    #: End when the queue is empty and all claimed jobs are done.
    burst: bool = False
    #: Run the functions that jobs name as their callbacks.
    allow_callbacks: bool = False
    timing: Timing = field(default_factory=Timing)

    def start_engine(self, stops: StopRequests) -> tuple[EngineProcess, Ready] | None:
        """As `engine_process.start_engine`."""
        return start_engine(self.engine, self.engine_options, self.timing, stops)


def is_outage(error: redis.RedisError) -> bool:
    """Whether the server is away, or can't be written to for now: what was to be said is kept and said later."""
    away = isinstance(error, redis.ConnectionError | redis.TimeoutError | OutOfMemoryError | ReadOnlyError)
    return away or str(error).startswith(REFUSALS)


def run_worker(options: WorkerOptions) -> None:
    """Work until SIGINT or SIGTERM; in burst mode, until the queue is empty.

    Raises ModelUnavailable or EngineUnavailable if there is no engine to be had, and redis.RedisError if the server
    can't be reached at the start.
    """
    with StopRequests() as stops:
        # Shorter than a lease, so that a worker that is cut off comes round to stopping before it is over.
        connection = connect(options.redis_url, options.timing.lease / 4)
        connection.ping()
        give_way()
        started = options.start_engine(stops)
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
        self._registration = Registration(connection, options.name, options.queues)
        self._lease = Lease(options.redis_url, options.name, options.queues, options.timing.lease)
        self._neighbours = Neighbours(
            connection, self._scripts, self._registration, options.queues, options.timing.lease
        )
        can = Abilities(ready.numerics_id, ready.weights_id, CONTEXT_READER)
        self._intake = Intake(
            self._scripts, options.redis_url, options.name, options.queues, can, options.timing.exact_grace
        )
        self._commands = CommandListener(options.redis_url, options.name)
        self._follow_ups = FollowUps(connection, options.name, options.queues, allow_callbacks=options.allow_callbacks)
        self._feeder = Feeder(engine)
        self._place = Place(options.name, options.served_model_name, ready.numerics_id, ready.weights_id)
        self._ledger = Ledger(self._scripts, self._place, self._drop)
        limits = Limits(ready.max_model_len, ready.kv_cache_tokens, ready.vocab_size)
        frontend = options.load_frontend(ready.model_directory)
        self._reader = RequestReader(options.served_model_name, frontend, limits, ready.weights_id)
        #: Contexts owned at once: those that the engine runs, and a few that are ready when one of them ends.
        self._capacity = ready.max_num_seqs + max(2, ready.max_num_seqs // 4)
        #: Whether somebody asked for the death of the engine, so that it is nobody's fault.
        self._killed_on_request = False
        self._num_followed = 0
        self._stop_deadline = 0.0
        self._next_heartbeat = self._next_look = self._next_neighbours = self._next_contact = 0.0
        self._last_commit = -math.inf
        self._last_pass = time.monotonic()
        self._selector = selectors.DefaultSelector()
        sources: list[HasFileno] = [*self._intake.doorbells, self._commands, self._lease, stops, engine]
        for source in sources:
            self._selector.register(source, selectors.EVENT_READ)

    def close(self) -> None:
        """End the engine's process and the threads, whatever state they are in."""
        self._feeder.engine.end(0)
        self._intake.stop()
        self._commands.stop()
        self._lease.stop()
        self._selector.close()

    def run(self) -> None:
        """Serve the queues until told to stop or, in burst mode, done; then give back what is not finished."""
        self._commands.await_subscribed(SUBSCRIBE_SECONDS)
        self._lease.start()
        self._registration.birth()
        self._release_strays()
        spare_collector()
        logger.info("worker %s serves %s", self._options.name, ", ".join(self._options.queues))
        while not self._stops.count and not self._done():
            self._sleep()
            self._mind_the_gap()
            self._hear_engine()
            self._restrain_engine()
            self._obey()
            self._contact_server()
            if self._feeder.engine.gone:
                self._replace_engine()
        self._wind_up()

    def _done(self) -> bool:
        """In burst mode: whether all is done, and nothing that follows it has queued more."""
        if not self._options.burst or self._ledger.jobs or not self._ledger.settled:
            return False
        idle = self._follow_ups.idle
        if self._follow_ups.num_served > self._num_followed:
            self._num_followed = self._follow_ups.num_served
            self._intake.ring()
        return idle and (self._intake.suspended or not self._intake.promising)

    def _sleep(self) -> None:
        now = time.monotonic()
        due = min(self._next_heartbeat, self._next_look, self._next_neighbours)
        if self._ledger.jobs or not self._ledger.settled:
            due = min(due, self._next_commit)
        if self._intake.promising and not self._intake.suspended and self._room > 0 and self._lease.held:
            due = now
        for key, _ in self._selector.select(max(0.0, max(due, self._next_contact) - now)):
            if isinstance(key.fileobj, Doorbell | EngineProcess | CommandListener | Lease):
                key.fileobj.clear()
            if isinstance(key.fileobj, Doorbell):
                self._intake.ring()

    def _mind_the_gap(self) -> None:
        """Where this process stood still, silence is no sign that the engine hangs."""
        now = time.monotonic()
        if now > self._last_pass + max(STOOD_STILL, self._options.timing.lease / 2):
            self._feeder.forgive_silence()
        self._last_pass = now

    def _obey(self) -> None:
        """Carry out the commands that have come."""
        for command in self._commands.take():
            logger.info("command %s %s", command.name, command.job_id)
            match command.name:
                case "stop-job" | "stop-execution":
                    self._stop_job(command)
                case "shutdown":
                    self._stops.request()
                case "kill-horse":
                    self._killed_on_request = True
                    self._feeder.engine.kill()
                case _:
                    logger.warning("command %s is not known here", command.name)

    def _stop_job(self, command: Command) -> None:
        job = self._ledger.jobs.get(command.job_id)
        if job is None or command.execution_id not in ("", job.ownership.execution_id):
            logger.warning("%s: does not run here, and can't be stopped", command.job_id)
            return
        self._fail(job, ErrorInfo(code="job_stopped", message="somebody stopped the job"), status="stopped")
        self._last_commit = -math.inf

    def _drop(self, job: OwnedJob) -> None:
        self._feeder.drop(job)  # whichever feeder it is by now

    def _fail(self, job: OwnedJob, error: ErrorInfo, *, status: str = "failed") -> None:
        """End a job without output, wherever it is."""
        self._ledger.end(fail(job, error, self._place, time.time(), status=status))
        self._feeder.drop(job)

    # ── the server ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _contact_server(self) -> None:
        """Everything that is due at the server: ends and commits, heartbeats, claims. An outage only delays it."""
        now = time.monotonic()
        if now < self._next_contact:
            return
        try:
            if self._next_contact:
                self._release_strays()
                self._next_contact, self._last_commit = 0.0, -math.inf
            if now >= self._next_commit:
                self._last_commit, self._feeder.commit_due = now, False
                self._end_overdue()
                held = self._lease.held
                self._flush()
                if held:  # so what others had taken is known now
                    self._feeder.resume()
            if now >= self._next_look:
                self._next_look = now + LOOK_INTERVAL
                self._intake.suspended = self._registration.suspended()
                self._intake.recall()
            if now >= self._next_heartbeat:
                self._next_heartbeat = now + HEARTBEAT_INTERVAL
                self._registration.heartbeat(self._ledger.owned)
                self._release_strays()
            if now >= self._next_neighbours:
                self._next_neighbours = now + self._neighbours.interval
                if self._neighbours.look():
                    self._intake.ring()
            self._claim()
            self._registration.show(self._state)
        except redis.RedisError as error:
            if not is_outage(error):
                raise
            logger.warning("the server can't be used, trying again in %g s: %s", RECONNECT_INTERVAL, error)
            self._next_contact = time.monotonic() + RECONNECT_INTERVAL

    @property
    def _next_commit(self) -> float:
        """When the next commit is due: when the engine says so, at the end of a step, unless that takes too long."""
        if self._feeder.commit_due:
            return -math.inf
        intervals = MAX_SILENT_INTERVALS if self._feeder.busy else 1
        return self._last_commit + intervals * self._options.timing.commit_interval

    @property
    def _state(self) -> str:
        """As rq's tools call it."""
        if self._intake.suspended:
            return "suspended"
        return "busy" if self._ledger.jobs else "idle"

    def _end_overdue(self) -> None:
        """End the jobs whose time is over."""
        clocks = time.time(), time.monotonic()
        for job in list(self._ledger.jobs.values()):
            if (error := job.overdue(*clocks)) is not None:
                self._fail(job, error)

    def _flush(self) -> None:
        if self._ledger.flush():
            self._intake.ring()
        ended, self._ledger.follow_ups = self._ledger.follow_ups, []
        for queue, job_id in ended:
            self._follow_ups.put(queue, job_id)

    def _release_strays(self) -> None:
        """Give back what is ours by the server's books, and not by our own.

        So it is when the reply to a claim was lost, when another process had our name before us, and when the server
        came back older than it was.
        """
        owned = set(self._ledger.owned)
        executions = self._registration.executions_of(self._options.name)
        strays = [stray.ownership for stray in executions if stray.ownership not in owned]
        if strays and any(self._scripts.release(self._options.name, strays)):
            self._intake.ring()

    @property
    def _room(self) -> int:
        return self._capacity - self._ledger.num_contexts

    def _claim(self) -> None:
        if not (self._lease.held and self._intake.promising):
            return
        claims = self._intake.claim(self._room)
        if not claims:
            return
        surplus = []
        for claim in claims:
            # How many contexts a job has shows only now. One that is larger than all the room runs nevertheless.
            if self._room > 0:
                self._take_in(claim)
            else:
                surplus.append(claim.ownership)
        if surplus:
            self._intake.ring()
            self._scripts.release(self._options.name, surplus)

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
        error = job.overdue(now, time.monotonic())
        if job.crashes >= MAX_CRASHES:
            message = f"the engine died {job.crashes} times while it ran this job; {job.history}"
            error = ErrorInfo(code="engine_crashed", message=message)
        elif job.lapses >= MAX_LAPSES:
            message = f"{job.lapses} workers vanished while they owned this job; {job.history}"
            error = ErrorInfo(code="worker_lost", message=message)
        if error is None:
            self._feeder.put(job)
        else:
            self._fail(job, error)

    # ── the engine ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _hear_engine(self) -> None:
        for job, ending in self._feeder.hear():
            if ending.error_code is not None:
                message = ending.error_message or ""
                self._fail(job, ErrorInfo(code=ending.error_code, message=message, param=ending.error_param))
            elif job.ended:
                self._ledger.end(succeed(job, self._place, time.time()))
                if not self._ledger.jobs:  # nothing else will be there to tell at the next commit
                    self._last_commit = -math.inf

    def _restrain_engine(self) -> None:
        """Pause an engine that is too far ahead of the server or may have lost its jobs; kill one that hangs."""
        if not self._lease.held or (self._next_contact and self._ledger.run_ahead > MAX_RUN_AHEAD):
            self._feeder.pause()
        if (seconds := self._feeder.silent_seconds) > self._options.timing.step_timeout:
            logger.error("the engine has not finished a step for %.1f s; it is killed", seconds)
            self._feeder.engine.kill()

    def _replace_engine(self) -> None:
        """The engine's process died: give back what it held, and start another."""
        dead = self._feeder
        self._selector.unregister(dead.engine)
        status = dead.engine.end()
        logger.error("the engine died with status %d; its %d jobs are queued again", status, len(dead.inside))
        suspects = [] if self._killed_on_request else dead.in_step
        self._killed_on_request = False
        self._insist(self._flush)
        # Others go in front: suspects run alone and would hold them up.
        self._insist(lambda: self._ledger.release(suspects, crashed=suspects))
        self._insist(lambda: self._ledger.release([*dead.inside, *dead.waiting]))
        self._intake.ring()
        started = self._options.start_engine(self._stops)
        if started is not None:
            self._feeder = Feeder(started[0])
            self._selector.register(self._feeder.engine, selectors.EVENT_READ)

    def _insist(self, action: Callable[[], object]) -> None:
        """Repeat something that the server must hear until it has heard it, or the time for stopping is over.

        What it doesn't hear is not lost: to the server the jobs run on, and whoever buries this worker queues them.
        """
        while self._time_to_stop() > 0:
            try:
                action()
                return
            except redis.RedisError as error:
                if not is_outage(error):
                    raise
                logger.warning("the server can't be used, trying again in %g s: %s", RECONNECT_INTERVAL, error)
                self._stops.wait(RECONNECT_INTERVAL)
        logger.error("stopped before the server could be told everything")

    def _time_to_stop(self) -> float:
        """Seconds left to wind up: no end until a stop request comes, STOP_SECONDS from then, none after a second."""
        if not self._stops.count:
            return math.inf
        self._stop_deadline = self._stop_deadline or time.monotonic() + STOP_SECONDS
        return self._stop_deadline - time.monotonic() if self._stops.count == 1 else 0.0

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _wind_up(self) -> None:
        """Let the engine finish its step, tell the server everything, give back the rest."""
        engine = self._feeder.engine
        engine.send(Stop())
        # Half of the time is the engine's, the rest for telling the server.
        while not engine.gone and (left := self._time_to_stop() - STOP_SECONDS / 2) > 0:
            self._stops.clear()
            self._selector.select(min(left, STOP_SECONDS))
            self._commands.clear()
            engine.clear()
            for doorbell in self._intake.doorbells:
                doorbell.clear()
            self._obey()
            self._hear_engine()
        self._insist(self._flush)
        rest = list(self._ledger.jobs.values())
        self._insist(lambda: self._ledger.release(rest))
        self._insist(self._release_strays)
        self._follow_ups.stop(max(0.0, min(STOP_SECONDS, self._time_to_stop())))
        self._insist(self._registration.death)
        if not self._ledger.owned:
            self._insist(self._lease.give_up)
        logger.info("worker %s stopped; %d unfinished jobs are queued again", self._options.name, len(rest))
