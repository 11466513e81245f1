"""Batches for a backend, made from sequences of tokens and where their blocks lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from batonq.kernels.backend import Backend
from batonq.kernels.batch import Batch
from batonq.kernels.program import BLOCK_SIZE
from batonq.kernels.reference import ReferenceBackend


@dataclass(frozen=True)
class Piece:
    """New tokens `start … end-1` of a sequence whose blocks are `blocks`; logits of all of them or none.

    They are stored, unless they are `query_only`.
    """

    tokens: Sequence[int]
    start: int
    end: int
    blocks: Sequence[int]
    logits: bool = True
    query_only: bool = False


def make_batch(pieces: Sequence[Piece]) -> Batch:
    counts = [piece.end - piece.start for piece in pieces]
    query_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tables = np.zeros((len(pieces), max(len(piece.blocks) for piece in pieces)), np.int32)
    for row, piece in zip(tables, pieces, strict=True):
        row[: len(piece.blocks)] = piece.blocks
    rows = [
        np.arange(first, first + count)
        for first, count, piece in zip(query_start, counts, pieces, strict=False)
        if piece.logits
    ]
    return Batch(
        token_ids=np.concatenate([piece.tokens[piece.start : piece.end] for piece in pieces]).astype(np.int32),
        positions=np.concatenate([np.arange(piece.start, piece.end) for piece in pieces]).astype(np.int32),
        query_start=query_start,
        context_len=np.array([piece.end for piece in pieces], np.int32),
        store_from=np.array([piece.end if piece.query_only else piece.start for piece in pieces], np.int32),
        block_tables=tables,
        logits_rows=np.concatenate([np.zeros(0), *rows]).astype(np.int32),
    )


def forward(backend: Backend, batch: Batch) -> torch.Tensor:
    """The batch's logits, in memory of their own."""
    return torch.from_numpy(backend.forward(batch).values.copy())


def blocks_of(length: int) -> int:
    return -(-length // BLOCK_SIZE)


def fill_with_nan(backend: ReferenceBackend) -> None:
    """What a reused block may hold in slots that nobody has written yet."""
    backend.keys.fill_(torch.nan)
    backend.values.fill_(torch.nan)
