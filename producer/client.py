"""The Python client: submit prompts to a queue, wait for their results."""

from __future__ import annotations

import time
import zlib
from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from itertools import islice
from typing import Any, TypeVar
from uuid import uuid4

import msgpack  # type: ignore[import-untyped, unused-ignore]
import redis
from pydantic import ValidationError
from redis.backoff import NoBackoff
from redis.retry import Retry
from rq import Queue
from rq.rate_limit import RateLimitRegistry
from rq.utils import now, utcformat

from batonq.producer import keys, serializer
from batonq.producer.errors import JobError, JobNotFoundError, ProducerError, ResultTimeoutError
from batonq.producer.schema import (
    FAILURE_TTL,
    FUNCTION,
    RESULT_TTL,
    ErrorInfo,
    PromptJob,
    Result,
    error_from_flat,
    job_from_flat,
)
from batonq.producer.stream import StreamChunk, StreamReader

#: Jobs handed to Redis in one transaction, and results fetched in one pipeline.
BATCH = 256

#: rq's statuses of jobs that have ended.
ENDED = frozenset({"finished", "failed", "stopped", "canceled"})
#: Those of jobs that lie in rq's failed registry, and may be sent back to their queues.
DEAD = frozenset({"failed", "stopped"})

#: One blocking read, in seconds; shorter than any sensible socket timeout.
_BLOCK_SECONDS = 1.0


_T = TypeVar("_T")


class Producer:
    """Hands prompts to the workers of a queue, and fetches what became of them.

    `redis` is a URL or a connection (which must return bytes). `queue` is where jobs go whose `model` is not given;
    a job's queue is named like its model. Connections made from a URL don't retry by themselves: a submission whose
    reply was lost raises redis's ConnectionError, and submitting again under the same ids is safe.
    """

    def __init__(self, url_or_connection: str | redis.Redis, *, queue: str | None = None) -> None:
        if isinstance(url_or_connection, str):
            self.connection = connect(url_or_connection)
        else:
            self.connection = url_or_connection
        self.queue = queue
        self._queues: dict[str, Queue] = {}
        self._cancel = self.connection.register_script(_source("job") + _source("cancel"))
        self._requeue = self.connection.register_script(_source("job") + _source("requeue"))

    def submit(self, job: PromptJob | None = None, /, *, queue: str | None = None, **fields: Any) -> str:
        """Enqueue one job, given whole or as PromptJob's and SamplingParams' fields side by side; return its id.

        `queue` overrides where it goes (a worker may serve several queues, `batonq worker --queue`). Raises JobError
        for fields that make no job. A job whose id is known already is not enqueued again.
        """
        return self.submit_many([job if job is not None else make_job(**fields)], queue=queue)[0]

    def submit_many(self, jobs: Iterable[PromptJob], *, queue: str | None = None) -> list[str]:
        """Enqueue jobs in batches, each batch in one transaction; return their ids in order."""
        ids: list[str] = []
        for batch in _batches(jobs):
            named = [self._named(job, queue) for job in batch]
            self.enqueue(named, queue=queue)
            ids.extend(str(job.id) for job in named)
        return ids

    def enqueue(self, jobs: Sequence[PromptJob], *, queue: str | None = None) -> set[str]:
        """Enqueue jobs that have an id and a model, except those whose id is known; return the known ids.

        Each goes to the queue of its model, or all to `queue`; then they need no model.
        """
        if queue is not None:
            return self._enqueue({str(job.id): job for job in jobs}, self._queue(queue))
        known: set[str] = set()
        for model in dict.fromkeys(str(job.model) for job in jobs):
            known |= self._enqueue({str(job.id): job for job in jobs if job.model == model}, self._queue(model))
        return known

    def result(self, job_id: str, timeout: float | None = None) -> Result:
        """Wait for a job to end and return its result, whether it has output or an error.

        `timeout` in seconds; None waits for ever. Raises JobNotFoundError, ResultTimeoutError.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        seen = b"0-0"
        while True:
            if (status := self.statuses([job_id])[job_id]) is None:
                raise JobNotFoundError(job_id)
            if status in ENDED and (result := self.results([job_id]).get(job_id)):
                return result
            left = _BLOCK_SECONDS if deadline is None else min(_BLOCK_SECONDS, deadline - time.monotonic())
            if left <= 0:
                raise ResultTimeoutError(job_id, timeout or 0.0)
            reply: Any = self.connection.xread({keys.results(job_id): seen}, block=max(1, int(left * 1000)))
            for _, entries in reply or ():
                seen = entries[-1][0]  # a retried job's earlier entry must not wake us again

    def results(self, ids: Iterable[str]) -> dict[str, Result]:
        """The results of those of these jobs that have ended, in one pipeline per batch, without waiting."""
        found: dict[str, Result] = {}
        for batch in _batches(ids):
            with self.connection.pipeline(transaction=False) as pipe:
                for job_id in batch:
                    pipe.hmget(keys.job(job_id), "status", "origin")
                    pipe.xrevrange(keys.results(job_id), count=1)
                replies = pipe.execute()
            for job_id, (status, origin), entries in zip(batch, replies[::2], replies[1::2], strict=True):
                if status is not None and status.decode() in ENDED:
                    entry = entries[0][1] if entries else {}
                    found[job_id] = _parse_result(job_id, status.decode(), (origin or b"").decode(), entry)
        return found

    def statuses(self, ids: Iterable[str]) -> dict[str, str | None]:
        """rq's status of each job; None for one that Redis doesn't know."""
        found: dict[str, str | None] = {}
        for batch in _batches(ids):
            with self.connection.pipeline(transaction=False) as pipe:
                for job_id in batch:
                    pipe.hget(keys.job(job_id), "status")
                for job_id, status in zip(batch, pipe.execute(), strict=True):
                    found[job_id] = status.decode() if status is not None else None
        return found

    def delete(self, ids: Iterable[str]) -> None:
        """Remove jobs and their results. One that is queued or running is dropped by its worker, without a result."""
        for batch in _batches(ids):
            with self.connection.pipeline(transaction=False) as pipe:
                for job_id in batch:
                    pipe.hmget(keys.job(job_id), "origin", "batonq_n")
                known = pipe.execute()
            with self.connection.pipeline(transaction=True) as pipe:
                for queue in {origin.decode() for origin, _ in known if origin is not None}:
                    for registry in (keys.finished, keys.failed, keys.canceled, keys.scheduled):
                        pipe.zrem(registry(queue), *batch)
                numbers = (int(n or 1) for _, n in known)
                pipe.delete(*(key for job_id, n in zip(batch, numbers, strict=True) for key in _keys(job_id, n)))
                pipe.execute()

    def stream(
        self, job_id: str, *, start: int | Sequence[int] = 0, timeout: float | None = None
    ) -> Iterator[StreamChunk]:
        """What a job submitted with `stream=True` writes, as it writes it, until it has ended.

        `start` is the offset of the last chunk that was read, to go on from there; one for each output if n > 1.
        `timeout` in seconds bounds the wait for each chunk. Raises JobNotFoundError, JobError if the job doesn't
        stream, JobFailedError if it fails or is stopped or canceled, and what else `StreamReader.chunks` does.
        """
        job = self._fields_of(job_id)
        if not job.get("stream"):
            raise JobError("not_streaming", f"job {job_id} was submitted without stream=True", param="stream")
        n = int(job.get("n", 1))
        starts = [start] * n if isinstance(start, int) else list(start)
        if len(starts) != n:
            raise JobError("invalid_parameter", f"start: {len(starts)} offsets for {n} outputs", param="start")
        return StreamReader(self.connection, job_id, starts).chunks(lambda: self._failure(job_id), timeout)

    def cancel(self, job_id: str) -> bool:
        """Cancel a job that is queued or runs: nothing of it is published after this returns.

        False if it had ended already. Raises JobNotFoundError.
        """
        client_id = self._fields_of(job_id).get("client_id") or False
        packed = msgpack.packb([keys.PREFIX, job_id, client_id, utcformat(now()), FAILURE_TTL], use_bin_type=False)
        before: Any = self._cancel(args=[packed])
        if before is None:
            raise JobNotFoundError(job_id)
        limit: Any = self.connection.hget(keys.job(job_id), "rate_limit_key")
        if limit:
            RateLimitRegistry(limit.decode(), self.connection).cancel(job_id)
        return before.decode() not in ENDED

    def requeue(self, ids: Iterable[str]) -> list[str]:
        """Send jobs that have failed or were stopped back to their queues; return the ids of those that went.

        They begin anew, and their deaths are forgotten. Jobs in any other status, and unknown ids, are left out.
        """
        requeued: list[str] = []
        for batch in _batches(ids):
            moment = now()
            with self.connection.pipeline(transaction=False) as pipe:
                for job_id in batch:
                    arguments = [keys.PREFIX, job_id, utcformat(moment), str(moment.timestamp())]
                    self._requeue(args=[msgpack.packb(arguments, use_bin_type=False)], client=pipe)
                    pipe.hget(keys.job(job_id), "rate_limit_key")
                replies = pipe.execute()
            for job_id, before, limit in zip(batch, replies[::2], replies[1::2], strict=True):
                if before is not None and before.decode() in DEAD:
                    requeued.append(job_id)
                    if limit:
                        registry = RateLimitRegistry(limit.decode(), self.connection)
                        registry.acquire_and_enqueue(registry.concurrency)
        return requeued

    def _fields_of(self, job_id: str) -> dict[str, Any]:
        """The fields of the PromptJob that a job carries; none if it carries something else."""
        data: Any = self.connection.hget(keys.job(job_id), "data")
        if data is None:
            raise JobNotFoundError(job_id)
        try:
            fields = serializer.loads(zlib.decompress(data))[3]
        except (ValueError, zlib.error, msgpack.UnpackException):
            return {}
        return fields if isinstance(fields, dict) else {}

    def _failure(self, job_id: str) -> ErrorInfo | None:
        """Why a job that gives nothing will give nothing more; None if it may. Raises JobNotFoundError."""
        status = self.statuses([job_id])[job_id]
        if status is None or status == "finished":  # its stream is gone, or was never written
            result = self.results([job_id]).get(job_id)
            if result is None or result.error is None:
                raise JobNotFoundError(job_id)
            return result.error
        return self.results([job_id])[job_id].error if status in ENDED else None

    def _named(self, job: PromptJob, queue: str | None = None) -> PromptJob:
        model = job.model or self.queue
        if queue is not None:
            return job.model_copy(update={"id": job.id or uuid4().hex})
        if not model:
            raise JobError("missing_model", "a job needs a model, or the producer a queue", param="model")
        return job.model_copy(update={"id": job.id or uuid4().hex, "model": model})

    def _queue(self, name: str) -> Queue:
        if name not in self._queues:
            self._queues[name] = Queue(name, connection=self.connection, serializer=serializer)
        return self._queues[name]

    def _enqueue(self, jobs: dict[str, PromptJob], queue: Queue) -> set[str]:
        """Enqueue those jobs that don't exist. Watching their keys makes look and write one step."""
        absent = dict(jobs)
        while absent:
            with self.connection.pipeline() as pipe:
                pipe.watch(*map(keys.job, absent))  # type: ignore[no-untyped-call]
                known = [job_id for job_id, status in self.statuses(absent).items() if status is not None]
                if known:  # look again without them: a running job's hash changes all the time
                    for job_id in known:
                        del absent[job_id]
                    continue
                pipe.multi()
                queue.enqueue_many([_job_data(job) for job in absent.values()], pipeline=pipe)
                try:
                    pipe.execute()
                    break
                except redis.WatchError:
                    continue
        return jobs.keys() - absent.keys()


def _source(name: str) -> str:
    return (resources.files("batonq.producer") / "lua" / f"{name}.lua").read_text()


def connect(url: str) -> redis.Redis:
    """A connection that raises when Redis is away, and doesn't send a command twice by itself.

    Raises ProducerError for what is no URL.
    """
    try:
        return redis.Redis.from_url(url, socket_timeout=10.0, retry=Retry(NoBackoff(), 0))
    except ValueError as error:
        raise ProducerError("invalid_redis_url", str(error), param="redis_url") from None


def make_job(**fields: Any) -> PromptJob:
    """A job from PromptJob's and SamplingParams' fields side by side. Raises JobError that names the field."""
    try:
        return job_from_flat(fields)
    except ValidationError as error:
        info = error_from_flat(error)
        raise JobError(info.code, info.message, param=info.param) from None


def _job_data(job: PromptJob) -> Any:
    return Queue.prepare_data(
        FUNCTION,
        kwargs=job.to_kwargs(),
        timeout=-1,  # never killed by the clock of rq
        result_ttl=RESULT_TTL,
        failure_ttl=FAILURE_TTL,
        description=describe(job),
        job_id=job.id,
    )


def describe(job: PromptJob) -> str:
    """What `rq info` and dashboards show of a job: its size, never its text."""
    if job.token_ids is not None:
        size = f"{len(job.token_ids)} tokens"
    elif job.messages is not None:
        size = f"{sum(len(message.content) for message in job.messages)} characters in {len(job.messages)} messages"
    else:
        size = f"{len(job.prompt or '')} characters"
    limit = "" if job.sampling.max_tokens is None else f", max_tokens {job.sampling.max_tokens}"
    return f"generate: {size}{limit}"


def _parse_result(job_id: str, status: str, model: str, entry: dict[bytes, bytes]) -> Result:
    """Our worker's result; where rq or another worker ended the job, an error result made from what they left."""
    payload = entry.get(b"return_value")
    if payload is not None:
        try:
            return Result.model_validate(serializer.loads(b64decode(payload)))
        except ValueError:
            message = "its worker left a result that is not batonq's"
            return Result(id=job_id, model=model, error=ErrorInfo(code="invalid_result", message=message))
    reason = zlib.decompress(b64decode(entry[b"exc_string"])).decode() if b"exc_string" in entry else ""
    last_line = reason.strip().rpartition("\n")[2]
    message = f"the job was {status} without a result" + (f": {last_line}" if last_line else "")
    return Result(id=job_id, model=model, error=ErrorInfo(code=f"job_{status}", message=message))


def _keys(job_id: str, n: int) -> Iterator[str]:
    """Everything that is kept of a job with `n` contexts under ids of its own."""
    yield keys.job(job_id)
    yield keys.results(job_id)
    yield keys.executions(job_id)
    yield keys.dependents(job_id)
    yield keys.dependencies(job_id)
    for context_id in keys.context_ids(job_id, n):
        yield from keys.of_context(context_id)


def _batches(items: Iterable[_T]) -> Iterator[list[_T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, BATCH)):
        yield batch
