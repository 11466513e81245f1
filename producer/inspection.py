"""What Redis holds of contexts, their history, and jobs that are dead, for whoever looks after a fleet.

Looking changes nothing, and never blocks the server: contexts are found by SCAN, registries are counted as they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import redis

from batonq.producer import keys
from batonq.producer.client import BATCH, DEAD, ENDED, Producer
from batonq.producer.errors import ContextNotFoundError
from batonq.producer.schema import Result

#: Keys that the server looks at in one step of a SCAN.
_SCAN_COUNT = 1000


@dataclass(frozen=True, slots=True)
class ContextSummary:
    """A context in a list of many."""

    id: str
    job_id: str
    queue: str
    state: str
    #: Name of the worker that runs it, or ran it last; None while it waits for one.
    owner: str | None
    #: Committed output tokens.
    tokens: int
    #: Seconds of Unix time, as everywhere here.
    created_at: float
    epoch: int


@dataclass(frozen=True, slots=True)
class ContextDetails:
    """Everything that a context's hash tells, but for the request itself."""

    id: str
    index: int
    state: str
    model_id: str
    queue: str
    schema: str
    owners: list[str]
    numerics: list[str]
    resumes: int
    input_tokens: int
    output_tokens: int
    max_tokens: int
    created_at: float
    updated_at: float


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a job's history. None: not known, or there is no such thing."""

    at: float | None
    event: str
    worker: str | None = None
    epoch: int | None = None
    #: Committed output tokens of all contexts.
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class JobDetails:
    """A job with those of its contexts that were asked for; none before its request is pinned."""

    id: str
    #: rq's status; None if the job was deleted and only the context is still there.
    status: str | None
    queue: str
    #: Why it has no output, if it has failed or was stopped; else empty.
    code: str
    message: str
    contexts: list[ContextDetails]
    history: list[Event]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A job that has failed or was stopped."""

    id: str
    queue: str
    ended_at: float
    code: str
    message: str
    #: Deaths of the engine that it took part in since it last made progress.
    deaths: int
    owners: list[str]


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """How many jobs of a queue are in which of rq's lists. An id that was canceled is queued until it is claimed."""

    queue: str
    queued: int
    running: int
    finished: int
    failed: int
    canceled: int
    scheduled: int
    deferred: int


def queues(connection: redis.Redis) -> list[str]:
    """Names of the queues that rq knows, in order."""
    members: Any = connection.smembers(keys.QUEUES)
    return sorted(member.decode().removeprefix(keys.queue("")) for member in members)


def find_contexts(
    connection: redis.Redis, *, queue: str | None = None, states: Collection[str] | None = None
) -> list[ContextSummary]:
    """The contexts of a queue, or of all, in these states, or in any; the oldest first."""
    found: dict[str, ContextSummary] = {}  # a SCAN may give a key twice
    for ids in _scan(connection):
        with connection.pipeline(transaction=False) as pipe:
            for context_id in ids:
                names = ("state", "queue", "job_id", "token_count", "created_at")
                pipe.hmget(keys.context(context_id), *names)
                pipe.strlen(keys.tokens(context_id))
            replies = pipe.execute()
        rows = {
            context_id: (*map(_text, fields), length)
            for context_id, fields, length in zip(ids, replies[::2], replies[1::2], strict=True)
            if fields[0] is not None  # it may have gone since the SCAN
        }
        wanted = {
            context_id: row
            for context_id, row in rows.items()
            if (queue is None or row[1] == queue) and (states is None or row[0] in states)
        }
        with connection.pipeline(transaction=False) as pipe:
            for row in wanted.values():
                pipe.hmget(keys.job(row[2]), "worker_name", "batonq_epoch")
            jobs = pipe.execute()
        for (context_id, row), (owner, epoch) in zip(wanted.items(), jobs, strict=True):
            state, name, job_id, count, created_at, length = row
            tokens = length // 4 or int(count or 0)
            found[context_id] = ContextSummary(
                context_id, job_id, name, state, _text(owner) or None, tokens, float(created_at or 0), int(epoch or 0)
            )
    return sorted(found.values(), key=lambda context: (context.created_at, context.id))


def find_context(producer: Producer, context_id: str) -> JobDetails:
    """A context with its job and history; all contexts of a job, if it is a job's id. Raises ContextNotFoundError."""
    connection = producer.connection
    held: Any = connection.hget(keys.context(context_id), "job_id")
    job_id = context_id if held is None else held.decode()
    job = _Hash(connection.hgetall(keys.job(job_id)))
    if held is None and not job:
        raise ContextNotFoundError(context_id)
    contexts = _details(connection, keys.context_ids(job_id, int(job.text("batonq_n") or 1)))
    if held is not None and context_id not in {context.id for context in contexts}:  # its job was deleted
        contexts = _details(connection, [context_id])
    status = job.text("status")
    result = producer.results([job_id]).get(job_id) if status in DEAD else None
    return JobDetails(
        job_id,
        status or None,
        job.text("origin") or next((context.queue for context in contexts), ""),
        *_error(result),
        [context for context in contexts if held is None or context.id == context_id],
        _history(job, contexts),
    )


def dead_letters(producer: Producer, queue: str | None = None) -> list[DeadLetter]:
    """The jobs in the failed registry of a queue, or of all queues, in the order of their ends."""
    found: list[DeadLetter] = []
    for name in queues(producer.connection) if queue is None else [queue]:
        members: Any = producer.connection.zrange(keys.failed(name), 0, -1)
        ids = [member.decode() for member in members]
        for batch in (ids[at : at + BATCH] for at in range(0, len(ids), BATCH)):
            found.extend(_dead(producer, name, batch))
    return sorted(found, key=lambda letter: (letter.ended_at, letter.id))


def count_jobs(connection: redis.Redis, queue: str | None = None) -> list[QueueCounts]:
    """How many jobs there are of a queue, or of each queue."""
    names = queues(connection) if queue is None else [queue]
    registries = (keys.started, keys.finished, keys.failed, keys.canceled, keys.scheduled, keys.deferred)
    with connection.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.llen(keys.queue(name))
            for registry in registries:  # len() of rq's own would clean up, and call running jobs abandoned
                pipe.zcard(registry(name))
        counts = iter(pipe.execute())
    return [QueueCounts(name, *(next(counts) for _ in range(1 + len(registries)))) for name in names]


class _Hash:
    """A Redis hash, read as text. What is absent is empty."""

    def __init__(self, fields: Any) -> None:
        self._fields: dict[bytes, bytes] = fields

    def __bool__(self) -> bool:
        return bool(self._fields)

    def text(self, name: str) -> str:
        return _text(self._fields.get(name.encode()))

    def moment(self, name: str) -> float | None:
        """One of rq's times."""
        return datetime.fromisoformat(text).timestamp() if (text := self.text(name)) else None


def _error(result: Result | None) -> tuple[str, str]:
    return ("", "") if result is None or result.error is None else (result.error.code, result.error.message)


def _text(raw: bytes | None) -> str:
    return "" if raw is None else raw.decode()


def _scan(connection: redis.Redis) -> Iterator[list[str]]:
    """Ids of all contexts, some at a time."""
    prefix = keys.context("")
    pattern = re.sub(r"([*?\[\]\\])", r"\\\1", prefix) + "*"
    cursor: Any = 0
    while True:
        reply: Any = connection.scan(cursor, match=pattern, count=_SCAN_COUNT)
        cursor, names = reply
        if names:
            yield [name.decode().removeprefix(prefix) for name in names]
        if cursor == 0:
            return


_DETAILS = (
    *("state", "index", "model_id", "queue", "schema", "owners", "numerics", "resumes"),
    *("input_token_count", "token_count", "max_tokens", "created_at", "updated_at"),
)


def _details(connection: redis.Redis, ids: Sequence[str]) -> list[ContextDetails]:
    """Those of a job's contexts that there are."""
    with connection.pipeline(transaction=False) as pipe:
        for context_id in ids:
            pipe.hmget(keys.context(context_id), *_DETAILS)
            pipe.strlen(keys.tokens(context_id))
        replies = pipe.execute()
    found, schema = [], ""
    for context_id, values, length in zip(ids, replies[::2], replies[1::2], strict=True):
        if values[0] is None:
            continue
        field = {name: _text(value) for name, value in zip(_DETAILS, values, strict=True)}
        schema = field["schema"] or schema  # the first context's hash says it for all
        found.append(
            ContextDetails(
                id=context_id,
                index=int(field["index"] or 0),
                state=field["state"],
                model_id=field["model_id"],
                queue=field["queue"],
                schema=schema,
                owners=field["owners"].split(",") if field["owners"] else [],
                numerics=field["numerics"].split(",") if field["numerics"] else [],
                resumes=int(field["resumes"] or 0),
                input_tokens=int(field["input_token_count"] or 0),
                output_tokens=length // 4 or int(field["token_count"] or 0),
                max_tokens=int(field["max_tokens"] or 0),
                created_at=float(field["created_at"] or 0),
                updated_at=float(field["updated_at"] or 0),
            )
        )
    return found


def _history(job: _Hash, contexts: Sequence[ContextDetails]) -> list[Event]:
    """What was noted between first claim and end, and what rq's fields tell of these."""
    noted = [_noted(line) for line in job.text("batonq_history").splitlines()]
    begun = _first_claim(job, contexts, noted)
    return [*_enqueued(job, begun + noted), *begun, *noted, *_end(job, contexts, noted)]


def _noted(line: str) -> Event:
    at, event, rest = line.split(" ", 2)
    worker, epoch, tokens = rest.rsplit(" ", 2)
    return Event(float(at), event, None if worker == "-" else worker, int(epoch), int(tokens))


def _enqueued(job: _Hash, after: Sequence[Event]) -> list[Event]:
    at = job.moment("enqueued_at")
    if at is None:
        return []
    again = any(event.event in {"retried", "requeued"} or (event.at or at) < at for event in after)
    # Of a job that was queued again, the field tells when that was.
    return [Event(job.moment("created_at"), "created") if again else Event(at, "enqueued")]


def _first_claim(job: _Hash, contexts: Sequence[ContextDetails], noted: Sequence[Event]) -> list[Event]:
    epoch = int(job.text("batonq_epoch") or 0)
    if epoch == 0:
        return []
    owners = contexts[0].owners if contexts else []
    noted_worker = next((event.worker for event in noted if event.epoch == 1 and event.worker), None)
    if epoch == 1:
        worker = next(iter(owners), noted_worker or job.text("worker_name") or None)
        return [Event(job.moment("started_at"), "claimed", worker, 1, 0)]
    if contexts and (not noted or contexts[0].created_at <= (noted[0].at or 0.0)):
        return [Event(contexts[0].created_at, "claimed", next(iter(owners), noted_worker), 1, 0)]
    return [Event(None, "claimed", noted_worker, 1, 0)]  # its contexts were made by a later claim


def _end(job: _Hash, contexts: Sequence[ContextDetails], noted: Sequence[Event]) -> list[Event]:
    status, at = job.text("status"), job.moment("ended_at")
    if status not in ENDED or at is None or (noted and noted[-1].event == status):
        return []
    epoch, tokens = job.text("batonq_epoch"), sum(context.output_tokens for context in contexts)
    return [Event(at, status, job.text("worker_name") or None, int(epoch) if epoch else None, tokens)]


def _dead(producer: Producer, queue: str, ids: Sequence[str]) -> Iterator[DeadLetter]:
    results = producer.results(ids)
    with producer.connection.pipeline(transaction=False) as pipe:
        for job_id in ids:
            pipe.hmget(keys.job(job_id), "ended_at", "batonq_crashes")
        replies = pipe.execute()
    for job_id, (ended_at, deaths) in zip(ids, replies, strict=True):
        result = results.get(job_id)
        if result is None:  # its keys have expired, or it was queued again by now
            continue
        at = datetime.fromisoformat(ended_at.decode()).timestamp() if ended_at else 0.0
        yield DeadLetter(job_id, queue, at, *_error(result), int(deaths or 0), result.owners)
