"""Carries a plan out: turns it into one ragged batch of arrays and has the backend compute it."""

from __future__ import annotations

import numpy as np

from batonq.engine.plan import Plan
from batonq.kernels.backend import Backend
from batonq.kernels.batch import Batch
from batonq.kernels.logits import Logits


class BackendRunner:
    """Owns the backend, and through it the memory of the KV blocks."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def forward(self, plan: Plan) -> Logits:
        """Compute every row of the plan; its logits, in the order that `Runner` says.

        They are valid until the next forward.
        """
        return self.backend.forward(to_batch(plan))


def to_batch(plan: Plan) -> Batch:
    """The arrays of a plan's rows, in their order."""
    rows = plan.rows
    query_start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([row.num_tokens for row in rows], out=query_start[1:])
    # Where a row's position 0 would be among the batch's tokens.
    firsts = [(first - row.start, row) for first, row in zip(query_start.tolist(), rows, strict=False)]
    block_tables = np.zeros((len(rows), max(len(row.block_table) for row in rows)), np.int32)
    for index, row in enumerate(rows):
        block_tables[index, : len(row.block_table)] = row.block_table
    return Batch(
        token_ids=np.array([token for row in rows for token in row.token_ids], np.int32),
        positions=np.array(
            [row.context.position_offset + at for row in rows for at in range(row.start, row.stop)], np.int32
        ),
        query_start=query_start,
        context_len=np.array([row.stop for row in rows], np.int32),
        store_from=np.array([row.store_from for row in rows], np.int32),
        block_tables=block_tables,
        logits_rows=np.array(
            [first + at for first, row in firsts if row.drawn for at in row.draws]
            + [first + at for first, row in firsts for at in row.prompt_logits]
            + [first + at for first, row in firsts if row.greedy for at in row.draws],
            np.int32,
        ),
        num_greedy=sum(len(row.draws) for row in rows if row.greedy),
    )
