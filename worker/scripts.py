"""The Lua scripts behind every transition of a job that matters, as typed calls.

Each is atomic, fenced by (epoch, execution id), validated before its first write, and changes nothing when it is
repeated after a lost reply. The sources are in `worker/lua/`; `prelude.lua` is put before each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from importlib import resources
from typing import Any

import msgpack
import redis

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
class Claim:
    """A job that was just claimed, with what earlier owners left of its context."""

    ownership: Ownership
    job: dict[str, bytes]
    context: dict[str, bytes]
    #: Committed output token ids, packed as little-endian uint32.
    tokens: bytes


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


def _source(name: str) -> str:
    folder = resources.files("batonq.worker") / "lua"
    return (folder / "prelude.lua").read_text() + (folder / f"{name}.lua").read_text()


class Scripts:
    """The scripts, bound to a connection. Every method raises redis.RedisError if the server can't be asked."""

    def __init__(self, connection: redis.Redis) -> None:
        self._connection = connection
        self._scripts = {
            name: connection.register_script(_source(name)) for name in ("claim", "pin", "commit", "finish", "release")
        }

    def _call(self, name: str, *arguments: Any, client: Any = None) -> Any:
        # Old-style strings: Lua's msgpack knows no other.
        packed = msgpack.packb([keys.PREFIX, *arguments], use_bin_type=False)
        return self._scripts[name](args=[packed], client=client)

    def claim(self, queue: str, worker: str, executions: Sequence[str], now: float, ttl: int) -> list[Claim]:
        """Take up to one job for each execution id. `ttl`: seconds that rq's records of an execution last."""
        rows = self._call("claim", queue, worker, list(executions), iso(now), str(now), ttl)
        return [
            Claim(Ownership(job_id.decode(), execution.decode(), int(epoch)), _hash(job), _hash(context), tokens)
            for job_id, execution, epoch, job, context, tokens in rows
        ]

    def pin(self, batch: Sequence[tuple[Ownership, Fields]]) -> list[bool]:
        """Write the effective requests of new contexts. False where the job was lost."""
        entries = [[o.job_id, o.execution_id, o.epoch, _flat(fields)] for o, fields in batch]
        return [bool(done) for done in self._call("pin", entries)]

    def commit(self, batch: Sequence[tuple[Ownership, int, bytes, Fields]]) -> list[Committed]:
        """Append tokens (packed, after `from` earlier ones) and write fields of many contexts at once."""
        entries = [[o.job_id, o.execution_id, o.epoch, start, tokens, _flat(f)] for o, start, tokens, f in batch]
        return [Committed(done) for done in self._call("commit", entries)]

    def finish(self, endings: Sequence[Ending]) -> list[tuple[bool, int]]:
        """End jobs in one round trip. For each: whether it was still ours, and how many jobs depend on it."""
        with self._connection.pipeline(transaction=False) as pipeline:
            for e in endings:
                owner = e.ownership
                self._call(
                    "finish",
                    *(owner.job_id, owner.execution_id, owner.epoch, e.queue, e.worker, e.status, _flat(e.result)),
                    *(iso(e.ended), e.seconds, e.default_ttl, e.client_id or False, _flat(e.context)),
                    client=pipeline,
                )
            return [(bool(done), int(dependents)) for done, dependents in pipeline.execute()]

    def release(self, worker: str, batch: Sequence[Ownership], *, crashed: bool) -> list[bool]:
        """Give jobs back to the front of their queues, in this order."""
        entries = [[o.job_id, o.execution_id, o.epoch] for o in batch]
        return [bool(done) for done in self._call("release", worker, crashed, entries)]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ends. `status` is "finished" or "failed"; `result` are the fields of rq's result entry."""

    ownership: Ownership
    queue: str
    worker: str
    status: str
    result: Fields
    ended: float
    seconds: float
    default_ttl: int
    client_id: str | None
    context: Fields
