"""One step's work as arrays: what a backend is told, for prefill chunks and decodes alike.

A batch is *ragged*: the new tokens of all its sequences lie one after another, and `query_start` says where each
sequence's begin. There is no other difference between prefill and decode than how many new tokens a sequence has.

    sequence      0           1     2
    token_ids   [ a b c d e | f |  g h ]        query_start [0 5 6 8]
    positions   [ 0 1 2 3 4 | 9 | 32 33]        context_len [5 10 34]
                                                store_from  [0 10 32]

Sequence 1 is *query-only*: the block of its token f already holds that token's key and value, perhaps for others too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    """Arrays of one step over S sequences with T new tokens in all; every array is int32.

    Before attention runs in a layer, the keys and values of all tokens to be stored are stored in that layer's blocks;
    so a sequence may read blocks that another sequence of the same batch fills.
    """

    #: [T] ids of the new tokens.
    token_ids: Int32
    #: [T] absolute position of each new token; it decides the rotary angle and the slot in the block table.
    positions: Int32
    #: [S+1] where each sequence's new tokens begin; the last entry is T.
    query_start: Int32
    #: [S] tokens of each sequence after this step: its last new token's position + 1.
    context_len: Int32
    #: [S] first position whose key and value are stored; new tokens before it only read.
    store_from: Int32
    #: [S, B] block ids of each sequence, in order; unused entries are 0 and are never read.
    block_tables: Int32
    #: [L] rows (0 … T-1) whose logits are wanted.
    logits_rows: Int32
    #: Of the last so many of these rows only the largest logit is wanted.
    num_greedy: int = 0

    def __post_init__(self) -> None:
        sequences = len(self.context_len)
        assert self.query_start.shape == (sequences + 1,)
        assert self.store_from.shape == (sequences,)
        assert self.token_ids.shape == self.positions.shape == (int(self.query_start[-1]),)
        assert self.block_tables.shape[:1] == (sequences,)

    def of_logits(self) -> Batch:
        """The rows whose logits are wanted, in their order, each as a sequence of its own that stores nothing."""
        rows = self.logits_rows
        sequence = np.repeat(np.arange(len(self.context_len)), np.diff(self.query_start))[rows]
        end = self.positions[rows] + 1
        return replace(
            self,
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            query_start=np.arange(len(rows) + 1, dtype=np.int32),
            context_len=end,
            store_from=end,
            block_tables=self.block_tables[sequence],
            logits_rows=np.arange(len(rows), dtype=np.int32),
        )
