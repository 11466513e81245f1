"""How Linux's scheduler is to see a worker's processes.

The engine's threads wait for each other at every step, so whoever takes the core of one holds up all.
"""

from __future__ import annotations

import os
from contextlib import suppress

_PARAMETERS = os.sched_param(0)


def give_way() -> None:
    """Have this process, when it wakes, wait for a free core or its turn, and take none from the engine.

    If it is scheduled in a way of its own already (`chrt`), nothing is changed.
    """
    _change(os.SCHED_OTHER, os.SCHED_BATCH)


def take_precedence() -> None:
    """Undo in the engine's process what it has inherited."""
    _change(os.SCHED_BATCH, os.SCHED_OTHER)


def _change(old: int, new: int) -> None:
    if os.sched_getscheduler(0) == old:
        with suppress(PermissionError):  # a sandbox may forbid it
            os.sched_setscheduler(0, new, _PARAMETERS)
