"""The function that every job names. Only a batonq worker can answer such a job, and it doesn't call this."""

from __future__ import annotations

from typing import Any, NoReturn


def generate(**fields: Any) -> NoReturn:
    """Tell whoever runs a stock rq worker on this queue what is needed instead."""
    raise RuntimeError(
        "This job is a batonq prompt; a stock rq worker can't run it. Start `batonq worker --model …` on its queue."
    )
