"""How long a worker waits for what; the command line explains each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """All in seconds."""

    #: Between commits of tokens and states.
    commit_interval: float = 0.05
    #: Of silence, after which others take over from a worker.
    lease: float = 10.0
    #: That a step may take before the engine counts as hung.
    step_timeout: float = 120.0
    #: That a job which prefers other numerics waits for a worker that has them.
    exact_grace: float = 30.0
