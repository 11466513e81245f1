"""What a run tells a person while it works: a bar on a terminal, otherwise a line every few seconds. All on stderr."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

_LINE_SECONDS = 5.0


class Reporter:
    """Counts rows and tokens, and shows them."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        if self._console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rates]}"),
            )
            # Refreshed by `tick`, so that no thread is alive when a worker is forked.
            self._bar = Progress(*columns, console=self._console, auto_refresh=False, transient=True)
        self._started = self._last_line = time.monotonic()
        self._total = self._finished_before = 0
        self.rows = self.errors = self.tokens = self.resumes = 0

    def begin(self, total: int, finished: int) -> None:
        """Start counting: `finished` of `total` rows were finished before."""
        self._total, self._finished_before = total, finished
        self._started = time.monotonic()
        if self._bar is not None:
            self._bar.add_task("rows", total=total, completed=finished, rates="")
            self._bar.start()

    def phase(self, text: str) -> None:
        """Say what is being waited for."""
        if self._bar is not None and self._bar.tasks:
            self._bar.update(self._bar.task_ids[0], description=text)
            self._bar.refresh()
        else:
            self.note(text)

    def note(self, text: str) -> None:
        """Say something that stays on the screen."""
        self._console.print(f"batonq: {text}", markup=False)

    def add(self, *, errors: int, rows: int, tokens: int, resumes: int) -> None:
        """Count rows that have just been finished: `rows` in all, `errors` of them with an error."""
        self.rows += rows
        self.errors += errors
        self.tokens += tokens
        self.resumes += resumes

    def tick(self) -> None:
        """Show where things stand, if it is time."""
        if self._bar is not None and self._bar.tasks:
            finished = self._finished_before + self.rows
            self._bar.update(self._bar.task_ids[0], completed=finished, rates=self._rates())
            self._bar.refresh()
        elif time.monotonic() - self._last_line >= _LINE_SECONDS:
            self._last_line = time.monotonic()
            self.note(f"{self._finished_before + self.rows}/{self._total} rows, {self._rates()}")

    def end(self) -> None:
        """Take the bar off the screen."""
        if self._bar is not None:
            self._bar.stop()

    @property
    def seconds(self) -> float:
        """Since `begin`."""
        return max(time.monotonic() - self._started, 1e-9)

    def _rates(self) -> str:
        left = self._total - self._finished_before - self.rows
        eta = f", {_duration(left * self.seconds / self.rows)} left" if self.rows else ""
        errors = f", {self.errors} errors" if self.errors else ""
        return f"{self.rows / self.seconds:.1f} rows/s, {self.tokens / self.seconds:.0f} output tokens/s{errors}{eta}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
