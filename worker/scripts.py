"""The Lua scripts behind every transition of a job that matters, as typed calls.

Each is atomic, fenced by (epoch, execution id), validated before its first write, and changes nothing when it is
repeated after a lost reply. The sources are in `worker/lua/`; what they share with the producer's is put before each.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from importlib import resources
from typing import Any, NamedTuple

import msgpack
import redis
from redis.exceptions import NoScriptError

from batonq.producer import keys

#: Flat field, value, field, value … of a hash or stream entry.
Fields = dict[str, str | bytes | int | float]


@dataclass(frozen=True, slots=True)
class Ownership:
    """The fence: who may write to a job. Both parts must match what the job's hash holds."""

    job_id: str
    execution_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Mirror:
    """What earlier owners left of one context."""

    fields: dict[str, bytes]
    #: Committed output token ids, packed as little-endian uint32.
    tokens: bytes = b""
    #: Their log probabilities (`engine.logprobs.pack`), if asked for.
    logprobs: bytes = b""


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that was just claimed from a queue. Its first context's hash pins the request of all."""

    ownership: Ownership
    queue: str
    job: dict[str, bytes]
    contexts: list[Mirror]


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a worker can carry on: tokens of which arithmetic and weights, and contexts of which major version."""

    numerics_id: str
    weights_id: str
    reader: int

    def to_wire(self) -> tuple[str, str, int]:
        """As the scripts read it."""
        return self.numerics_id, self.weights_id, self.reader


@dataclass(frozen=True, slots=True)
class SetAside:
    """A job that was left for another worker: `reason` is "numerics", "weights" or "schema"."""

    job_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Claims:
    """What a claim brought, and what it met that this worker can't carry on."""

    claims: list[Claim]
    aside: list[SetAside]


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """One entry of a context's stream: text up to `end` tokens, or, with `last`, the mark that nothing follows."""

    end: int
    fields: Fields
    last: bool = False


class ContextCommit(NamedTuple):
    """What is new about one context: tokens after `start` earlier ones, with their log probabilities, and the rest."""

    context_id: str
    start: int
    tokens: bytes
    logprobs: bytes
    #: Of its hash, those that changed or none.
    fields: Fields
    entries: Sequence[StreamEntry] = ()


@dataclass(frozen=True, slots=True)
class ContextEnd:
    """How a context of a job ends; `acknowledged` are the tokens that the server is known to have."""

    context_id: str
    acknowledged: int
    fields: Fields
    entries: Sequence[StreamEntry] = ()


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ends. `status` is "finished", "failed" or "stopped"; `result` are the fields of rq's result entry."""

    ownership: Ownership
    queue: str
    worker: str
    status: str
    result: Fields
    ended: float
    seconds: float
    default_ttl: int
    client_id: str | None = None
    contexts: Sequence[ContextEnd] = ()
    #: Code and message for the readers of its streams, where it has no output.
    error: tuple[str, str] | None = None
    #: Whether another try may go better, if rq's `Retry` leaves one.
    transient: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of an ending: published at all, or the job queued again; and whether something has to follow."""

    done: bool
    retried: bool
    follow_up: bool


@dataclass(frozen=True, slots=True)
class Loss:
    """An ownership that was lost, and what it may have left behind."""

    ownership: Ownership
    queue: str
    context_ids: Sequence[str]
    client_id: str | None


class Committed(IntEnum):
    """What became of one entry of a commit."""

    CONTRADICTION = -1
    LOST = 0
    DONE = 1


def iso(moment: float) -> str:
    """Unix seconds in rq's notation."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _flat(fields: Fields) -> list[str | bytes]:
    """Names and values in turn. Numbers become text here: Lua would round them."""
    values = [value if isinstance(value, str | bytes) else str(value) for value in fields.values()]
    return [part for pair in zip(fields, values, strict=True) for part in pair]


def _hash(flat: Sequence[bytes]) -> dict[str, bytes]:
    return {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}


#: The script files beside `producer/lua/job.lua` that make up each script.
_FILES = {
    "claim": ("fitness", "claim"),
    "pin": ("pin",),
    "commit": ("outputs", "commit"),
    "finish": ("outputs", "back", "finish"),
    "release": ("back", "release"),
    "reap": ("back", "reap"),
    "recall": ("fitness", "recall"),
    "settle": ("settle",),
    "sweep": ("sweep",),
}
#: Jobs that one sweep moves at most, that one recall looks at, and that one script ends: the server does nothing else
#: meanwhile.
_SWEEP_BATCH, _RECALL_BATCH, _FINISH_BATCH = 1000, 64, 64


def _source(files: Sequence[str]) -> str:
    shared = (resources.files("batonq.producer") / "lua" / "job.lua").read_text()
    return shared + "".join((resources.files("batonq.worker") / "lua" / f"{file}.lua").read_text() for file in files)


def _raise_first_error(replies: Sequence[Any]) -> None:
    for reply in replies:
        if isinstance(reply, redis.ResponseError):
            raise reply


def _entries(entries: Sequence[StreamEntry]) -> list[Any]:
    return [[entry.end, int(entry.last), _flat(entry.fields)] for entry in entries]


class Scripts:
    """The scripts, bound to a connection. Every method raises redis.RedisError if the server can't be asked."""

    def __init__(self, connection: redis.Redis) -> None:
        self._connection = connection
        self._scripts = {name: connection.register_script(_source(files)) for name, files in _FILES.items()}
        #: Past the client, whose layers take longer than the commit of many contexts.
        self._line: Any = None

    def sha(self, name: str) -> str:
        """The digest that names a script to the server."""
        return str(self._scripts[name].sha)

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._call_each(name, [arguments])[0]

    def _call_each(self, name: str, batch: Sequence[Sequence[Any]]) -> list[Any]:
        """Run a script with each of these arguments, in one round trip."""
        script = self._scripts[name]
        # Old-style strings: Lua's msgpack knows no other.
        packed = [msgpack.packb([keys.PREFIX, *arguments], use_bin_type=False) for arguments in batch]
        try:
            return self._ask([("EVALSHA", script.sha, 0, arguments) for arguments in packed])
        except NoScriptError:
            return self._ask([("EVAL", script.script, 0, arguments) for arguments in packed])

    def _ask(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        self._line = self._line or self._connection.connection_pool.get_connection()
        try:
            stale = self._line.can_read()  # nothing is owed to us
        except redis.ConnectionError:  # the server has closed it
            stale = True
        if stale:
            self._line.disconnect()
        self._line.send_packed_command(self._line.pack_commands(commands))
        replies = [self._reply() for _ in commands]  # all of them, before any error is raised
        _raise_first_error(replies)
        return replies

    def _reply(self) -> Any:
        try:
            return self._line.read_response()
        except redis.ResponseError as error:
            return error

    def claim(
        self, queues: Sequence[str], worker: str, can: Abilities, executions: Sequence[str], now: float, ttl: int
    ) -> Claims | None:
        """Take up to one job for each execution id, from the first queues first; None while rq is suspended.

        `ttl`: seconds that rq's records of an execution last.
        """
        moments = (iso(now), str(now), ttl)
        found = self._call("claim", list(queues), worker, list(executions), *moments, can.to_wire())
        if found is None:
            return None
        rows, aside = found
        claims = [
            Claim(
                Ownership(job_id.decode(), execution.decode(), int(epoch)),
                queue.decode(),
                _hash(job),
                [Mirror(_hash(fields), tokens, logprobs) for fields, tokens, logprobs in contexts],
            )
            for job_id, execution, epoch, queue, job, contexts in rows
        ]
        return Claims(claims, [SetAside(job_id.decode(), reason.decode()) for job_id, reason in aside])

    def recall(self, queue: str, can: Abilities, grace: float) -> list[str]:
        """Bring back to the queue what was set aside and can go on here now; the ids.

        After `grace` seconds aside, a job that only prefers its own numerics goes on with any, and one of other weights
        comes back to be failed.
        """
        found = self._call("recall", queue, can.to_wire(), grace, _RECALL_BATCH)
        return [job_id.decode() for job_id in found]

    def pin(self, batch: Sequence[tuple[Ownership, bool, Sequence[tuple[str, Fields]]]]) -> list[bool]:
        """Write the effective requests of new jobs: whether they stream, and their contexts. False where lost."""
        entries = [
            [o.job_id, o.execution_id, o.epoch, streaming, [[name, _flat(fields)] for name, fields in contexts]]
            for o, streaming, contexts in batch
        ]
        return [bool(done) for done in self._call("pin", entries)]

    def commit(self, batch: Sequence[tuple[Ownership, Sequence[ContextCommit]]]) -> list[Committed]:
        """Write what is new of many jobs at once. A job without news is only checked for being ours."""
        flat: list[Any] = []
        for owner, contexts in batch:
            flat += (owner.job_id, owner.execution_id, owner.epoch, len(contexts))
            for context_id, start, tokens, logprobs, fields, stream in contexts:
                more = [logprobs, _flat(fields), _entries(stream)] if logprobs or fields or stream else False
                flat += (context_id, start, tokens, more)
        outcomes = [Committed.DONE] * len(batch)
        failed = self._call("commit", flat)
        for place, outcome in zip(failed[::2], failed[1::2], strict=True):
            outcomes[place] = Committed(outcome)
        return outcomes

    def finish(self, endings: Sequence[Ending]) -> list[Finished]:
        """End jobs, in one round trip."""
        batch = [
            (
                *(e.ownership.job_id, e.ownership.execution_id, e.ownership.epoch),
                *(e.queue, e.worker, e.status, _flat(e.result)),
                *(iso(e.ended), str(e.seconds), e.default_ttl, e.client_id or False),
                [[c.context_id, c.acknowledged, _flat(c.fields), _entries(c.entries)] for c in e.contexts],
                *(e.error or False, e.transient),
            )
            for e in endings
        ]
        calls = [[batch[i : i + _FINISH_BATCH]] for i in range(0, len(batch), _FINISH_BATCH)]
        outcomes = [outcome for call in self._call_each("finish", calls) for outcome in call]
        _raise_first_error(outcomes)
        return [Finished(*map(bool, flags)) for flags in outcomes]

    def release(self, worker: str, batch: Sequence[Ownership], *, crashed: Container[Ownership] = ()) -> list[bool]:
        """Give jobs back to the front of their queues, in this order; of those `crashed`, the engine's death counts."""
        entries = [[o.job_id, o.execution_id, o.epoch, o in crashed] for o in batch]
        return [bool(done) for done in self._call("release", worker, entries)]

    def reap(self, queue: str, worker: str, counter: str | None, members: Sequence[str] = ()) -> list[str] | None:
        """Take over the jobs of a worker whose lease in `queue` is still `counter` (None: it has none); their ids.

        `members` are `job id:execution id`s that are its beside those in its own set. None if the worker lives.
        """
        found = self._call("reap", queue, worker, False if counter is None else counter, list(members))
        return None if found is None else [job_id.decode() for job_id in found]

    def settle(self, worker: str, default_ttl: int, losses: Sequence[Loss]) -> None:
        """Clear away what lost ownerships left behind."""
        entries = [
            [o.ownership.job_id, o.ownership.execution_id, o.queue, list(o.context_ids), o.client_id or False]
            for o in losses
        ]
        self._call("settle", worker, default_ttl, entries)

    def sweep(self, queue: str, now: float, default_ttl: int) -> None:
        """Queue the scheduled jobs whose time has come, and see to the canceled ones."""
        self._call("sweep", queue, iso(now), default_ttl, _SWEEP_BATCH)
