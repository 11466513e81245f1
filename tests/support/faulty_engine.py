"""The module that a worker's `--engine` names in tests of faults: the real engine, slowed down, and struck at will.

`FAULTS` in the environment is a JSON object: `step_seconds`, a pause in each step; `at`, a point in a step ("before
forward", "before sample", "after sample"); `step`, the number of the step in which that point strikes; `do`, what
happens there ("kill" the process, "hang", "out of memory"); `once`, a file that is made then, after which nothing
strikes any more.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from batonq.engine.engine import Engine
from batonq.engine.loading import load_engine as load_real_engine
from batonq.engine.loading import load_frontend
from batonq.engine.plan import Plan, Samples

__all__ = ["FAULTS", "load_engine", "load_frontend"]

FAULTS = "BATONQ_TEST_FAULTS"


class _Faults:
    def __init__(self, step_seconds: float = 0.0, at: str = "", step: int = 0, do: str = "", once: str = "") -> None:
        self._step_seconds, self._at, self._step, self._do, self._once = step_seconds, at, step, do, once
        self._steps = 0

    def reach(self, point: str) -> None:
        if point == "before forward":
            self._steps += 1
            time.sleep(self._step_seconds)
        if point != self._at or self._steps != self._step or Path(self._once).exists():
            return
        Path(self._once).touch()
        if self._do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._do == "hang":
            while True:
                signal.pause()
        raise MemoryError("struck")


class _Runner:
    def __init__(self, runner: Any, faults: _Faults) -> None:
        self._runner, self._faults = runner, faults

    def forward(self, plan: Plan) -> Any:
        self._faults.reach("before forward")
        logits = self._runner.forward(plan)
        self._faults.reach("before sample")
        return logits


class _Sampler:
    def __init__(self, sampler: Any, faults: _Faults) -> None:
        self._sampler, self._faults = sampler, faults

    def sample(self, plan: Plan, logits: Any) -> Samples:
        samples: Samples = self._sampler.sample(plan, logits)
        self._faults.reach("after sample")
        return samples


def load_engine(options: dict[str, Any]) -> tuple[Engine[Any], Path]:
    engine, directory = load_real_engine(options)
    faults = _Faults(**json.loads(os.environ.get(FAULTS, "{}")))
    engine.runner, engine.sampler = _Runner(engine.runner, faults), _Sampler(engine.sampler, faults)
    return engine, directory
