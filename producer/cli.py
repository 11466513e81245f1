"""The command line `batonq`: subcommands are named here, and imported when they are used."""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from typing import Annotated, Any

import redis
import typer
from typer.core import TyperCommand, TyperGroup

from batonq.producer.errors import ProducerError

#: Name: where its function is, and what it does. Its parameters are annotated as typer reads them.
COMMANDS = {
    "run": ("batonq.producer.commands:run", "Run every row of a JSONL file, and resume where it was stopped."),
    "submit": ("batonq.producer.commands:submit", "Put one prompt on the queue, and wait for its text if asked."),
    "workers": ("batonq.producer.commands:workers", "List the workers, and what they are doing."),
    "contexts": ("batonq.producer.inspection_commands:contexts", "List the contexts: state, owner, tokens, age."),
    "context": ("batonq.producer.inspection_commands:context", "Show one context, and its history."),
    "jobs": ("batonq.producer.inspection_commands:jobs", "Count the jobs; list dead ones, and send them back."),
    "worker": ("batonq.worker.cli:worker", "Serve a model: take jobs from Redis until told to stop."),
}

_HELP = """\
Batch inference over a Redis queue. Whatever stops, the work goes on where it was.

\b
On one machine, with nothing else running:
  batonq run -i prompts.jsonl -o results.jsonl --model smollm2-135m
With a fleet, on any number of machines:
  export REDIS_URL=redis://queue.example:6379
  batonq worker --model smollm2-135m
  batonq run -i prompts.jsonl -o results.jsonl --model smollm2-135m
  batonq submit --model smollm2-135m --wait "Once upon a time"
"""


class _LazyCommand(TyperCommand):
    """Stands for a subcommand in the list; becomes it when it is used."""

    def __init__(self, name: str, target: str, summary: str) -> None:
        super().__init__(name, help=summary)
        self._target = target

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        return self._load().make_context(info_name, args, parent=parent, **extra)

    def _load(self) -> Any:
        module, _, function = self._target.partition(":")
        try:
            callback = getattr(import_module(module), function)
        except ModuleNotFoundError as error:
            message = f"batonq {self.name} needs {error.name}: pip install 'batonq[{self.name}]'"
            raise ProducerError("not_installed", message, module=error.name) from None
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name=self.name)(callback)
        return typer.main.get_command(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"batonq {metadata.version('batonq')}")
        raise typer.Exit


def _group() -> TyperGroup:
    app = typer.Typer(name="batonq", help=_HELP, add_completion=False, no_args_is_help=True, rich_markup_mode=None)

    @app.callback()
    def _options(
        version: Annotated[
            bool,
            typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit."),
        ] = False,
    ) -> None:
        pass

    group = typer.main.get_group(app)
    for name, (target, summary) in COMMANDS.items():
        group.add_command(_LazyCommand(name, target, summary))
    return group


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit. A mistake of the user's ends in one message on stderr, not in a traceback."""
    try:
        _group().main(args=arguments, prog_name="batonq")
    except ProducerError as error:
        _fail(error.message)
    except redis.RedisError as error:
        _fail(f"Redis: {error}")
    except OSError as error:  # a file that may not be read, a directory that may not be written
        _fail(str(error))


def _fail(message: str) -> None:
    sys.stderr.write(f"batonq: {message}\n")
    sys.exit(1)
