"""The subcommands `run` and `submit`: their options, in the words of their help."""

from __future__ import annotations

import json
import socket
import sys
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from batonq.producer import keys
from batonq.producer.client import Producer, make_job
from batonq.producer.errors import ProducerError
from batonq.producer.progress import Reporter
from batonq.producer.run import RunOptions
from batonq.producer.run import run as run_rows

_Model = Annotated[str, typer.Option("--model", help="Model: an alias (smollm2-135m), a directory, or a name served.")]
_RedisUrl = Annotated[str | None, typer.Option("--redis-url", envvar="REDIS_URL", help="Redis of the fleet.")]


class OnError(StrEnum):
    """What to do about rows that cannot be run."""

    CONTINUE = "continue"
    FAIL = "fail"


class OnDuplicate(StrEnum):
    """What to do about a custom_id that is used twice."""

    FAIL = "fail"
    ERROR = "error"


def run(
    input_file: Annotated[Path, typer.Option("--input", "-i", help="JSONL: OpenAI batch lines, or plain rows.")],
    output_file: Annotated[Path, typer.Option("--output", "-o", help="JSONL in the form of OpenAI's batch output.")],
    model: _Model,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model on the queue. [default: last part of --model]")
    ] = None,
    redis_url: _RedisUrl = None,
    error_file: Annotated[Path | None, typer.Option(help="Where error rows go. [default: the output]")] = None,
    on_error: Annotated[
        OnError, typer.Option(help="continue: rows that can't be run become error rows. fail: stop before any work.")
    ] = OnError.CONTINUE,
    on_duplicate: Annotated[
        OnDuplicate,
        typer.Option(help="A custom_id used twice. fail: stop before any work. error: the later row is an error row."),
    ] = OnDuplicate.FAIL,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start afresh; what the output has is lost.")] = False,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Run the output's error rows again.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Run only the first so many rows.")] = None,
    order: Annotated[
        bool,
        typer.Option("--order", help="Write rows, errors too, in the order of the input; early ones wait on disk."),
    ] = False,
    max_in_flight: Annotated[int, typer.Option(min=1, help="Rows in Redis at a time.")] = 1024,
    worker_command: Annotated[
        str | None,
        typer.Option(help="Command that starts a worker, instead of `python -m batonq.worker`; same options."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the worker: type of weights and KV cache.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Of the worker: contexts run at a time.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Of the worker: tokens a step.")] = None,
    kv_cache_memory: Annotated[str | None, typer.Option(help="Of the worker: memory of the KV cache.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Of the worker: longest context.")] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=0, help="Of the worker: tokens guessed a step; 0: none.")
    ] = None,
    num_threads: Annotated[int | None, typer.Option(min=1, help="Of the worker: threads.")] = None,
) -> None:
    """Run every row of a JSONL file through a model, each exactly once.

    Without REDIS_URL or --redis-url an embedded server and one worker are started, and end with the run. Stopped by
    Ctrl-C, kill or power loss, the same command resumes: finished rows are kept, and begun ones go on where they were.

    \b
    A row is one of
      {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
       "body": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50}}
      {"prompt": "Once upon a time", "max_tokens": 50, "temperature": 0}
      {"messages": [{"role": "user", "content": "Hello"}], "seed": 7}

    Exit codes: 0 all rows have output; 3 some are error rows; 130 interrupted; 1 it could not go on; 2 wrong options.
    """
    engine = {
        "--dtype": dtype,
        "--max-num-seqs": max_num_seqs,
        "--max-num-batched-tokens": max_num_batched_tokens,
        "--kv-cache-memory": kv_cache_memory,
        "--max-model-len": max_model_len,
        "--num-speculative-tokens": num_speculative_tokens,
        "--num-threads": num_threads,
    }
    options = RunOptions(
        input=input_file,
        output=output_file,
        model=model,
        served_model_name=served_model_name,
        redis_url=redis_url or None,
        error_file=error_file,
        on_error=on_error.value,
        on_duplicate=on_duplicate.value,
        overwrite=overwrite,
        retry_errors=retry_errors,
        limit=limit,
        order=order,
        max_in_flight=max_in_flight,
        worker_command=worker_command,
        engine_options=[word for flag, value in engine.items() if value is not None for word in (flag, str(value))],
    )
    raise typer.Exit(run_rows(options, Reporter()))


#: Seconds without a heartbeat after which a worker is not counted as alive; it sends one every 15.
_SILENT_SECONDS = 60.0


def workers(
    redis_url: _RedisUrl = None,
    here: Annotated[bool, typer.Option("--here", help="Only workers of this host; for a container's health.")] = False,
) -> None:
    """List the workers: name, queue, state, host, process, seconds since the last heartbeat.

    Exit codes: 0 at least one is alive; 1 none is.
    """
    if not redis_url:
        raise typer.BadParameter("a server is needed: set REDIS_URL or give --redis-url")
    alive = 0
    with Producer(redis_url).connection as connection:
        for key in sorted(connection.smembers(keys.WORKERS)):
            fields = {name.decode(): value.decode() for name, value in connection.hgetall(key).items()}
            if not fields or (here and fields["hostname"] != socket.gethostname()):
                continue
            heartbeat = datetime.strptime(fields["last_heartbeat"], "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
            age = (datetime.now(UTC) - heartbeat).total_seconds()
            alive += age < _SILENT_SECONDS
            name = key.decode().removeprefix(keys.worker(""))
            where = f"{fields['hostname']}:{fields['pid']}"
            typer.echo(f"{name}  {fields['queues']}  {fields['state']}  {where}  {age:.0f} s")
    if not alive:
        raise typer.Exit(1)


def submit(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    model: _Model,
    redis_url: _RedisUrl = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a user's message, in the chat template.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Most output tokens. [default: the model's room]")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [default: 1]")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus. [default: 1]")] = None,
    top_k: Annotated[int | None, typer.Option(help="Most likely tokens kept. [default: all]")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text. [default: random]")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the result and print its text.")] = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds to wait. [default: no limit]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result, or the job's id, as JSON.")] = False,
) -> None:
    """Put one prompt on the queue of a model and print the job's id; with --wait, its text.

    \b
    Example:
      batonq submit --redis-url redis://localhost:6379 --model smollm2-135m --chat --wait "Name three colours."
    """
    if not redis_url:
        raise typer.BadParameter("a queue is needed: set REDIS_URL or give --redis-url")
    text = sys.stdin.read() if prompt == "-" else prompt
    given: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    job = make_job(
        **given,
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop or None,
    )
    producer = Producer(redis_url)
    job_id = producer.submit(job)
    if not wait:
        typer.echo(json.dumps({"id": job_id}) if as_json else job_id)
        return
    result = producer.result(job_id, timeout)
    if as_json:
        typer.echo(result.model_dump_json())
    if result.error is not None:
        raise ProducerError(result.error.code, result.error.message, param=result.error.param)
    if not as_json:
        typer.echo(result.choices[0].text)
