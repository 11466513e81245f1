"""`batonq worker`: its options, and what becomes of its errors."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import uuid
from importlib import import_module
from typing import Annotated, Literal

import redis
import typer
from rich.console import Console
from rich.logging import RichHandler

from batonq.engine.config import EngineConfig
from batonq.engine.errors import EngineError
from batonq.worker.errors import WorkerError
from batonq.worker.timing import Timing

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DEFAULTS = EngineConfig()
_TIMING = Timing()

DTypeName = Literal["float32", "bfloat16"]


def parse_memory(text: str) -> int:
    """Bytes of "2GiB", "512M" or "1073741824"; the units are powers of 1024."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size such as 512MiB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def worker(
    model: Annotated[str, typer.Option(help="A directory, a GGUF file, the alias smollm2-135m, or a hub id.")],
    redis_url: Annotated[
        str, typer.Option(envvar="REDIS_URL", help="The server that holds the queue.")
    ] = "redis://localhost:6379",
    served_model_name: Annotated[
        str, typer.Option(help="Model name of the jobs. Default: the alias or the directory's name.")
    ] = "",
    queue: Annotated[
        list[str] | None,
        typer.Option(help="Queue to serve; more than one in strict order, the first first. Default: the model's name."),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of this worker. Default: host, process id and chance.")] = "",
    burst: Annotated[bool, typer.Option("--burst", help="End once the queue is empty and all jobs are done.")] = False,
    allow_callbacks: Annotated[
        bool,
        typer.Option(
            "--allow-callbacks",
            help="Run the functions that jobs name as success, failure or stopped callbacks (rq's Callback), in this "
            "process: then whoever can enqueue can run any function that can be imported here. Otherwise they are "
            "logged and skipped. Webhooks are always sent.",
        ),
    ] = False,
    dtype: Annotated[DTypeName, typer.Option(help="Arithmetic and KV cache.")] = "float32",
    max_num_seqs: Annotated[int, typer.Option(help="Contexts that run at once.")] = _DEFAULTS.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens that one step computes, prefill and decode together.")
    ] = _DEFAULTS.max_num_batched_tokens,
    kv_cache_memory: Annotated[
        int, typer.Option(parser=parse_memory, metavar="SIZE", help="Memory of the KV blocks, such as 2GiB.")
    ] = "1GiB",  # type: ignore[assignment]
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest context in tokens. Default: what the model was trained for.")
    ] = None,
    num_speculative_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Tokens that a step may guess for a context from what it repeats, so that several come at once; the "
            "output is the same. 0: none.",
        ),
    ] = _DEFAULTS.num_speculative_tokens,
    num_threads: Annotated[
        int | None, typer.Option(envvar="BATONQ_NUM_THREADS", help="Threads of the arithmetic. Default: all cores.")
    ] = None,
    commit_interval: Annotated[
        float, typer.Option(min=0.001, help="Seconds between commits of new tokens; what a crash costs at most.")
    ] = _TIMING.commit_interval,
    lease: Annotated[
        float, typer.Option(min=0.4, help="Seconds of silence after which other workers take over from this one.")
    ] = _TIMING.lease,
    step_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that a step may take; an engine that takes longer is killed.")
    ] = _TIMING.step_timeout,
    exact_grace: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds that a job begun with other arithmetic (dtype, instruction set) waits for a worker that has "
            "it, before it goes on here with other bits; never if it asks for exact: require.",
        ),
    ] = _TIMING.exact_grace,
    engine: Annotated[
        str, typer.Option(hidden=True, help="Module with load_engine and load_frontend, for an engine of one's own.")
    ] = "batonq.engine.loading",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve a model: claim jobs from its queues, run them in one continuous batch, publish the results.

    Ctrl-C or SIGTERM stops it in order: it finishes the step, commits the tokens and gives unfinished jobs back to the
    front of the queue, where another worker carries them on. A second one stops it at once.

    Example: batonq worker --model smollm2-135m --redis-url redis://localhost:6379 --kv-cache-memory 2GiB
    """
    set_up_logging(log_level)
    try:
        config = EngineConfig(
            max_num_seqs, max_num_batched_tokens, kv_cache_memory, max_model_len, num_speculative_tokens, num_threads
        )
        name = name or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        timing = Timing(commit_interval, lease, step_timeout, exact_grace)
        where = redis_url, name, queue or []
        serve(engine, model, served_model_name, dtype, config, timing, where, burst=burst, callbacks=allow_callbacks)
    except (WorkerError, EngineError) as error:
        typer.echo(f"batonq worker: {error.message}", err=True)
        raise typer.Exit(1) from None
    except ModuleNotFoundError as error:
        typer.echo(f"batonq worker needs {error.name}: pip install 'batonq[worker]'", err=True)
        raise typer.Exit(1) from None
    except redis.RedisError as error:
        typer.echo(f"batonq worker: the server at {redis_url} can't be used: {error}", err=True)
        raise typer.Exit(1) from None


def serve(
    engine: str,
    model: str,
    served_model_name: str,
    dtype: DTypeName,
    config: EngineConfig,
    timing: Timing,
    where: tuple[str, str, list[str]],
    *,
    burst: bool,
    callbacks: bool,
) -> None:
    """Run a worker with these settings until it is stopped. `where`: Redis URL, the worker's name, its queues."""
    # Imported here, so that `--help` and the other commands don't wait for it.
    from batonq.engine.loading import EngineOptions, default_served_model_name  # noqa: PLC0415
    from batonq.worker.worker import WorkerOptions, run_worker  # noqa: PLC0415

    served = served_model_name or default_served_model_name(model)
    options = EngineOptions(model, served, dtype, config)
    redis_url, name, queues = where
    run_worker(
        WorkerOptions(
            redis_url=redis_url,
            served_model_name=served,
            queues=tuple(dict.fromkeys(queues)) or (served,),
            name=name,
            engine=engine,
            engine_options=options.to_dict(),
            load_frontend=import_module(engine).load_frontend,
            burst=burst,
            allow_callbacks=callbacks,
            timing=timing,
        )
    )


def set_up_logging(level: str) -> None:
    """Log to stderr: in colour on a terminal, plain lines elsewhere."""
    numeric = logging.getLevelNamesMapping().get(level.upper())
    if numeric is None:
        raise typer.BadParameter(f"{level!r} is not one of debug, info, warning, error")
    if sys.stderr.isatty():
        logging.basicConfig(
            level=numeric, format="%(message)s", handlers=[RichHandler(console=Console(stderr=True), show_path=False)]
        )
    else:
        logging.basicConfig(level=numeric, format="%(asctime)s %(levelname)s %(message)s")
