"""The subcommands `contexts`, `context` and `jobs`: what is shown of a fleet's work, and how."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

import typer

from batonq.producer import inspection
from batonq.producer.client import Producer

_RedisUrl = Annotated[str | None, typer.Option("--redis-url", envvar="REDIS_URL", help="Redis of the fleet.")]
_Queue = Annotated[str | None, typer.Option("--queue", help="Only of this queue.")]
_Limit = Annotated[int | None, typer.Option(min=1, help="At most so many, the oldest first. [default: all]")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]


class State(StrEnum):
    """What a context is doing."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    PREEMPTED = "PREEMPTED"
    FINISHED = "FINISHED"
    ERROR = "ERROR"


def contexts(
    redis_url: _RedisUrl = None,
    queue: _Queue = None,
    state: Annotated[
        State | None,
        typer.Option(case_sensitive=False, help="Only in this state. [default: those that have not ended]"),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="In whatever state, ended ones too.")] = False,
    limit: _Limit = None,
    as_json: _Json = False,
) -> None:
    """List the contexts, the oldest first: id, state, owner, output tokens, age, epoch (how often it was claimed).

    \b
    Examples:
      batonq contexts --redis-url redis://localhost:6379
      batonq contexts --queue smollm2-135m --state PREEMPTED --limit 20
      batonq contexts --all --json | grep my-job
    """
    if state is not None:
        states = {state.value}
    else:
        states = {each.value for each in State if every or each not in (State.FINISHED, State.ERROR)}
    found = inspection.find_contexts(_producer(redis_url).connection, queue=queue, states=states)[:limit]
    if as_json:
        for each in found:
            typer.echo(json.dumps(asdict(each)))
        return
    now = time.time()
    _table(
        ("ID", "STATE", "OWNER", "TOKENS", "AGE", "EPOCH"),
        [(c.id, c.state, c.owner or "-", c.tokens, age(now - c.created_at), c.epoch) for c in found],
    )


def context(
    context_id: Annotated[str, typer.Argument(metavar="ID", help="Id of a context, or of a job.")],
    redis_url: _RedisUrl = None,
    as_json: _Json = False,
) -> None:
    """Show a context and what happened to its job: claims, crashes, owners, with the tokens committed by then.

    The id of a job with several outputs shows each of its contexts briefly. Exit code 1: there is no such id.

    \b
    Examples:
      batonq context --redis-url redis://localhost:6379 my-job
      batonq context my-job.0 --json
    """
    found = inspection.find_context(_producer(redis_url), context_id)
    if as_json:
        typer.echo(json.dumps(asdict(found)))
        return
    _fields({"job": found.id, "status": found.status or "deleted", "queue": found.queue})
    if found.code:
        _fields({"error": f"{found.code}: {_one_line(found.message)}"})
    if len(found.contexts) == 1:
        _show(found.contexts[0])
    elif found.contexts:
        typer.echo()
        _table(
            ("CONTEXT", "STATE", "OWNERS", "TOKENS", "OF", "RESUMES"),
            [
                (c.id, c.state, ", ".join(c.owners) or "-", c.output_tokens, c.max_tokens, c.resumes)
                for c in found.contexts
            ],
        )
    typer.echo()
    _table(
        ("TIME", "EVENT", "WORKER", "EPOCH", "TOKENS"),
        [
            (iso(e.at), e.event, *("-" if v is None else v for v in (e.worker, e.epoch, e.tokens)))
            for e in found.history
        ],
    )


def jobs(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="With --requeue: only these jobs.")] = None,
    redis_url: _RedisUrl = None,
    dead: Annotated[bool, typer.Option("--dead", help="List jobs that have failed or were stopped.")] = False,
    requeue: Annotated[bool, typer.Option("--requeue", help="With --dead: send them back to their queues.")] = False,
    queue: _Queue = None,
    limit: _Limit = None,
    as_json: _Json = False,
) -> None:
    """Count the jobs of each queue by status; with --dead, list those that have failed, and why.

    With --dead --requeue dead jobs go back to their queues and begin anew: those with the ids given, or all that --dead
    would list. Exit code 1: none went.

    \b
    Examples:
      batonq jobs --redis-url redis://localhost:6379
      batonq jobs --dead --queue smollm2-135m
      batonq jobs --dead --requeue my-job my-other-job
    """
    if requeue and not dead:
        raise typer.BadParameter("--requeue goes with --dead")
    if ids and not requeue:
        raise typer.BadParameter("ids go with --dead --requeue; one job is shown by `batonq context`")
    if ids and (queue is not None or limit is not None):
        raise typer.BadParameter("--queue and --limit go without ids")
    producer = _producer(redis_url)
    if requeue:
        _requeue(producer, ids or [letter.id for letter in inspection.dead_letters(producer, queue)[:limit]], as_json)
    elif dead:
        _show_dead(inspection.dead_letters(producer, queue)[:limit], as_json)
    else:
        _show_counts(inspection.count_jobs(producer.connection, queue)[:limit], as_json)


def age(seconds: float) -> str:
    """A duration in the largest unit that has at least one, two days first: 12 s, 3 min, 47 h, 2 d."""
    seconds = max(seconds, 0.0)
    for unit, size, most in (("s", 1, 60), ("min", 60, 60), ("h", 3600, 48)):
        if seconds < size * most:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds // 86400)} d"


def iso(moment: float | None) -> str:
    """Unix seconds as ISO 8601 in UTC, to the millisecond; a dash for None."""
    if moment is None:
        return "-"
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _producer(redis_url: str | None) -> Producer:
    if not redis_url:
        raise typer.BadParameter("a server is needed: set REDIS_URL or give --redis-url")
    return Producer(redis_url)


def _show(context: inspection.ContextDetails) -> None:
    _fields(
        {
            "context": context.id,
            "state": context.state,
            "model": context.model_id,
            "owners": ", ".join(context.owners),
            "resumes": str(context.resumes),
            "numerics": ", ".join(context.numerics),
            "schema": context.schema,
            "created": iso(context.created_at),
            "updated": iso(context.updated_at),
            "input": f"{context.input_tokens} tokens",
            "output": f"{context.output_tokens} of at most {context.max_tokens} tokens",
        }
    )


def _show_dead(letters: Sequence[inspection.DeadLetter], as_json: bool) -> None:
    if as_json:
        for letter in letters:
            typer.echo(json.dumps(asdict(letter)))
        return
    _table(
        ("ID", "QUEUE", "ENDED", "DEATHS", "OWNERS", "ERROR"),
        [
            (d.id, d.queue, iso(d.ended_at), d.deaths, ", ".join(d.owners) or "-", f"{d.code}: {_one_line(d.message)}")
            for d in letters
        ],
    )


def _show_counts(counts: Sequence[inspection.QueueCounts], as_json: bool) -> None:
    if as_json:
        for each in counts:
            typer.echo(json.dumps(asdict(each)))
        return
    names = ("queue", "queued", "running", "finished", "failed", "canceled", "scheduled", "deferred")
    _table([name.upper() for name in names], [[getattr(each, name) for name in names] for each in counts])


def _requeue(producer: Producer, ids: Sequence[str], as_json: bool) -> None:
    ids = list(dict.fromkeys(ids))
    requeued = producer.requeue(ids)
    left = [job_id for job_id in ids if job_id not in set(requeued)]
    why = {
        job_id: "there is no such job" if status is None else f"its status is {status}"
        for job_id, status in producer.statuses(left).items()
    }
    if as_json:
        typer.echo(json.dumps({"requeued": requeued, "left": why}))
    else:
        typer.echo(f"{len(requeued)} queued again")
        for job_id, reason in why.items():
            typer.echo(f"{job_id}: {reason}")
    if not requeued:
        raise typer.Exit(1)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _fields(fields: dict[str, str]) -> None:
    for name, value in fields.items():
        typer.echo(f"{name:<10}{value or '-'}")


def _table(heading: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under a heading, in columns as wide as what is in them."""
    lines = [list(heading), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
