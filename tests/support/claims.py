"""Claims made by hand, for tests of what the scripts do with them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from batonq.worker.scripts import Abilities, Claim, Scripts

#: A worker that reads what this version writes, with the null engine's arithmetic.
ABLE = Abilities("null", "", 1)


def claim_jobs(
    scripts: Scripts, queues: Sequence[str], worker: str, count: int = 1, can: Abilities = ABLE
) -> list[Claim]:
    """Up to `count` jobs."""
    executions = [uuid.uuid4().hex for _ in range(count)]
    found = scripts.claim(queues, worker, can, executions, time.time(), 480)
    assert found is not None
    return found.claims
