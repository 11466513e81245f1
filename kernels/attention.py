"""Paged attention in torch: query tiles against gathered KV blocks, with the same bits for prefill and decode.

The work of a batch is cut into tiles. A tile is either up to `QUERY_TILE` new tokens of one sequence, or one new token
of each of several sequences with about as many blocks. In a tile all query heads of a KV head are rows of one matrix,
which is multiplied with one block at a time:

    scores [S, B, kv_heads, rows, 32] = q [S, 1, kv_heads, rows, head_dim] · k [S, B, kv_heads, 32, head_dim]ᵀ

so that no product reaches across blocks. The maximum over blocks is exact in any order; sums over blocks go pairwise
by block index, and a block that a query doesn't see adds exact zeros. Hence neither chunking nor neighbours show.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batonq.kernels.batch import Batch

#: New tokens of one sequence that are done at once.
QUERY_TILE = 64

#: Blocks that a tile of several sequences gathers at most, to stay within the CPU's cache.
DECODE_TILE_BLOCKS = 128

#: A matrix product of fewer rows takes kernels with another order of summation (MKL, probed bitwise).
MIN_ROWS = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """S sequences with R new tokens each, B blocks of context."""

    #: [S, R] rows of the batch.
    rows: Tensor
    #: [S · B] block ids, padded with a sequence's own first block.
    blocks: Tensor
    #: First block with keys that some query must not see, and [S, B - hidden_from, 1, R, 1, 32] true at those.
    hidden_from: int
    hidden: Tensor
    #: First block that may hold slots beyond a context, and [S, B - stale_from, 1, 32, 1] true at those slots.
    stale_from: int
    stale: Tensor


def plan(batch: Batch, block_size: int, window: int) -> list[Tile]:
    """The tiles of a batch; `window` as in `program.Attention`."""
    return [
        _tile(batch, sequences, rows, block_size, window)
        for sequences, rows in [*_prefill_tiles(batch), *_decode_tiles(batch, block_size)]
    ]


def _prefill_tiles(batch: Batch) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Sequences [1] and rows [1, R] for the sequences that have more than one new token."""
    for sequence, (start, end) in enumerate(pairwise(batch.query_start.tolist())):
        if end - start > 1:
            for first in range(start, end, QUERY_TILE):
                yield np.array([sequence]), np.arange(first, min(first + QUERY_TILE, end))[None]


def _decode_tiles(batch: Batch, block_size: int) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Sequences [S] and rows [S, 1] for those with one new token: longest first, like with like."""
    single = np.flatnonzero(np.diff(batch.query_start) == 1)
    blocks = -(-batch.context_len[single] // block_size)
    order = np.argsort(-blocks, kind="stable")
    single, blocks = single[order], blocks[order]
    first = 0
    while first < len(single):
        longest = int(blocks[first])
        limit = first + max(1, DECODE_TILE_BLOCKS // longest)
        similar = first + int(np.count_nonzero(blocks[first:] * 4 >= longest * 3))
        end = min(limit, similar)
        sequences = single[first:end]
        yield sequences, batch.query_start[sequences].astype(np.int64)[:, None]
        first = end


def _tile(
    batch: Batch,
    sequences: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    block_size: int,
    window: int,
) -> Tile:
    positions = batch.positions[rows].astype(np.int64)  # [S, R]
    ends = positions[:, -1] + 1
    count = -(-int(ends.max()) // block_size)
    held = -(-ends // block_size)
    used = np.arange(count)[None] < held[:, None]
    tables = batch.block_tables[sequences, :count].astype(np.int64)
    blocks = np.where(used, tables, tables[:, :1])
    hidden_from = 0 if window > 0 else (int(positions.min()) + 1) // block_size
    keys = np.arange(hidden_from * block_size, count * block_size).reshape(1, -1, 1, 1, 1, block_size)
    queries = positions[:, None, None, :, None, None]
    hidden = keys > queries
    if window > 0:
        hidden |= keys <= queries - window
    stale_from = int(ends.min()) // block_size
    slots = np.arange(stale_from * block_size, count * block_size).reshape(1, -1, 1, block_size, 1)
    return Tile(
        rows=torch.from_numpy(rows),
        blocks=torch.from_numpy(blocks.ravel()),
        hidden_from=hidden_from,
        hidden=torch.from_numpy(hidden),
        stale_from=stale_from,
        stale=torch.from_numpy(slots >= ends.reshape(-1, 1, 1, 1, 1)),
    )


def attend(tile: Tile, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention of one tile in float32: [S, R, q_heads, head_dim].

    `queries` is [T, q_heads, head_dim]; `keys` and `values` are one layer's cache [blocks, kv_heads, 32, head_dim].
    """
    sequences, new = tile.rows.shape
    kv_heads, block_size, head_dim = keys.shape[1:]
    group = queries.shape[1] // kv_heads
    padded = max(group, -(-MIN_ROWS // new))  # rows · group is at least MIN_ROWS
    gathered = (sequences, -1, kv_heads, block_size, head_dim)

    q = queries.new_zeros((sequences, kv_heads, new, padded, head_dim), dtype=torch.float32)
    q[:, :, :, :group] = queries[tile.rows].view(sequences, new, kv_heads, group, head_dim).transpose(1, 2)
    q = q.mul_(scale).view(sequences, 1, kv_heads, new * padded, head_dim)

    k = keys.index_select(0, tile.blocks).view(gathered).float()
    scores = torch.matmul(q, k.transpose(-1, -2))
    # What lies beyond a context may be NaN, so hidden scores are overwritten, never multiplied away.
    masked = scores.view(sequences, -1, kv_heads, new, padded, block_size)[:, tile.hidden_from :]
    masked.masked_fill_(tile.hidden, -torch.inf)
    weights = scores.sub_(scores.amax(dim=(1, 4), keepdim=True)).exp_()

    v = values.index_select(0, tile.blocks).view(gathered).float()
    v[:, tile.stale_from :].masked_fill_(tile.stale, 0.0)
    mixed = _sum_blocks(_mix(tile, weights, v)).div_(_sum_blocks(weights.sum(dim=-1, keepdim=True)))
    heads = mixed.view(sequences, kv_heads, new, padded, head_dim)[:, :, :, :group]
    return heads.transpose(1, 2).reshape(sequences, new, kv_heads * group, head_dim)


def _mix(tile: Tile, weights: Tensor, v: Tensor) -> Tensor:
    """weights · v; a value that is no number counts only for the queries that see it."""
    new = tile.rows.shape[1]
    if new == 1 or bool(torch.isfinite(v).all()):
        return torch.matmul(weights, v)
    mixed = torch.empty((*weights.shape[:-1], v.shape[-1]))
    by_token = mixed.view(*mixed.shape[:3], new, -1, mixed.shape[-1])
    for token in range(new):
        seen = v.clone()
        seen[:, tile.hidden_from :].masked_fill_(tile.hidden[:, :, :, token].transpose(-1, -2), 0.0)
        by_token[:, :, :, token] = torch.matmul(weights, seen).view(by_token.shape)[:, :, :, token]
    return mixed


def _sum_blocks(x: Tensor) -> Tensor:
    """Sum over dimension 1, pairwise by index: trailing zeros don't change the result."""
    while (count := x.shape[1]) > 1:
        pairs = x[:, 0 : count - 1 : 2] + x[:, 1::2]
        x = torch.cat([pairs, x[:, -1:]], dim=1) if count % 2 else pairs
    return x[:, 0]
