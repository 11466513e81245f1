"""The collector of reference cycles in a worker's processes; `batonq run` does the same in `producer/process.py`."""

from __future__ import annotations

import gc

#: New objects after which the collector looks at the youngest. The default, 700, is a handful of jobs.
_COLLECT_AFTER = 20_000


def spare_collector() -> None:
    """Have it leave alone what exists by now, and look at the rest less often.

    What start-up made stays for good, and counting references frees what comes and goes with each job.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)
