"""The reference backend: runs a program op by op in torch, on the CPU.

It is the oracle for compiled backends and the backend in use where there is none. A row's logits don't depend on the
rows beside it, on chunking or on where blocks lie (see `kernels/linear.py` and `kernels/attention.py` for how).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from batonq.kernels import attention, probe
from batonq.kernels.batch import Batch
from batonq.kernels.errors import WeightMismatch
from batonq.kernels.linear import PackedLinear
from batonq.kernels.logits import Logits
from batonq.kernels.program import (
    NONE,
    ActivationMul,
    Add,
    Attention,
    DType,
    Embed,
    HeadNorm,
    Linear,
    LmHead,
    Op,
    Program,
    RmsNorm,
    RopeStore,
    Rows,
    SelectRows,
    Weight,
)

#: Raised whenever a change may alter a bit of any result.
KERNEL_VERSION = 1

TORCH_DTYPE = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16}


@dataclass(slots=True)
class _Step:
    """One forward: what the ops read beside their operands, and the buffers they fill."""

    token_ids: Tensor
    positions: Tensor
    #: Rows whose key and value are stored: all of them, or their indices.
    stored: slice | Tensor
    #: Block and slot where the key and value of each stored row go.
    blocks: Tensor
    slots: Tensor
    logits_rows: Tensor
    #: Attention tiles by the kind of rows and the window.
    tiles: dict[tuple[Rows, int], list[attention.Tile]]
    buffers: list[Tensor]


class ReferenceBackend:
    """A program with its weights and a KV cache of `num_blocks` blocks, zeroed.

    `weights` maps the names that the program's weights are made of to tensors (`WeightMismatch` if one is missing or
    has another shape); they are converted and packed, and not kept. `num_threads` sets torch's threads, which are the
    whole process's; None leaves them alone.
    """

    def __init__(
        self, program: Program, weights: Mapping[str, Tensor], num_blocks: int, num_threads: int | None = None
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.program = program
        spec = program.kv_cache
        shape = (spec.layers, num_blocks, spec.kv_heads, spec.block_size, spec.head_dim)
        self.keys = torch.zeros(shape, dtype=TORCH_DTYPE[spec.dtype])
        self.values = torch.zeros(shape, dtype=TORCH_DTYPE[spec.dtype])
        self._linears: dict[int, PackedLinear] = {}
        self._weights: dict[int, Tensor] = {}
        for op in program.ops:
            self._prepare(op, weights)

    def _prepare(self, op: Op, weights: Mapping[str, Tensor]) -> None:
        """Packs the matrices of products, and keeps other weights as they are."""
        table = self.program.weights
        if isinstance(op, Linear | LmHead):
            bias = op.bias if isinstance(op, Linear) else NONE
            self._linears[op.weight] = PackedLinear(
                materialise(table[op.weight], weights),
                None if bias == NONE else materialise(table[bias], weights),
            )
            return
        for field in ("weight", "cos", "sin"):
            index = getattr(op, field, NONE)
            if index != NONE and index not in self._weights:
                self._weights[index] = materialise(table[index], weights)

    @cached_property
    def numerics_id(self) -> str:
        """Names the arithmetic: two backends with the same id give the same bits."""
        dtype = self.program.dtype
        weights = {name: torch.from_numpy(values) for name, values in probe.weights(dtype).items()}
        forward = ReferenceBackend(probe.program(dtype), weights, probe.NUM_BLOCKS).forward
        return f"{dtype.label}-torch-{KERNEL_VERSION}-{probe.digest(forward)}"

    @property
    def layout_id(self) -> str:
        """Names how the bytes of a KV block are laid out."""
        spec = self.program.kv_cache
        return f"plain-{spec.dtype.label}-{spec.layers}x{spec.kv_heads}x{spec.block_size}x{spec.head_dim}"

    def forward(self, batch: Batch) -> Logits:
        """Runs a batch: stores its keys and values, and returns the logits of the wanted rows."""
        with torch.inference_mode():
            step = self._start(batch)
            for op in self.program.ops:
                _RUN[type(op)](self, op, step)
        logits, whole = step.buffers[self.program.output], len(batch.logits_rows) - batch.num_greedy
        largest, ids = logits[whole:].max(dim=1)
        return Logits(logits[:whole].numpy(), ids.int().numpy(), largest.numpy())

    def _start(self, batch: Batch) -> _Step:
        block_size = self.program.kv_cache.block_size
        positions = torch.from_numpy(batch.positions).long()
        sequence = torch.repeat_interleave(torch.from_numpy(batch.query_start).diff())
        stored = positions >= torch.from_numpy(batch.store_from).long()[sequence]
        blocks = torch.from_numpy(batch.block_tables).long()[sequence, positions // block_size]
        work = {Rows.TOKENS: batch, Rows.LOGITS: batch.of_logits()}
        reading = {self._reading(op) for op in self.program.ops if isinstance(op, Attention)}
        return _Step(
            token_ids=torch.from_numpy(batch.token_ids).long(),
            positions=positions,
            stored=slice(None) if stored.all() else stored.nonzero().squeeze(1),
            blocks=blocks[stored],
            slots=positions[stored] % block_size,
            logits_rows=torch.from_numpy(batch.logits_rows).long(),
            tiles={(rows, window): attention.plan(work[rows], block_size, window) for rows, window in reading},
            buffers=[torch.empty(0)] * len(self.program.buffers),
        )

    def _embed(self, op: Embed, step: _Step) -> None:
        step.buffers[op.out] = self._weights[op.weight].index_select(0, step.token_ids)

    def _rms_norm(self, op: RmsNorm, step: _Step) -> None:
        step.buffers[op.out] = _normalise(step.buffers[op.x], self._weights[op.weight], op.eps)

    def _head_norm(self, op: HeadNorm, step: _Step) -> None:
        heads = self._heads(step.buffers[op.qkv])[:, op.first_head : op.first_head + op.heads]
        heads.copy_(_normalise(heads, self._weights[op.weight], op.eps))

    def _linear(self, op: Linear, step: _Step) -> None:
        step.buffers[op.out] = self._linears[op.weight](step.buffers[op.x])

    def _rope_store(self, op: RopeStore, step: _Step) -> None:
        kv_heads = self.program.kv_cache.kv_heads
        heads = self._heads(step.buffers[op.qkv])
        cos = self._weights[op.cos].index_select(0, step.positions).unsqueeze(1)
        sin = self._weights[op.sin].index_select(0, step.positions).unsqueeze(1)
        rotated = heads[:, : op.q_heads + kv_heads]
        first, second = rotated.float().chunk(2, dim=-1)
        rotated.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
        stored = heads[step.stored]
        self.keys[op.layer, step.blocks, :, step.slots] = stored[:, op.q_heads : op.q_heads + kv_heads]
        self.values[op.layer, step.blocks, :, step.slots] = stored[:, op.q_heads + kv_heads :]

    def _reading(self, op: Attention) -> tuple[Rows, int]:
        return self.program.buffers[op.out].rows, op.window

    def _attention(self, op: Attention, step: _Step) -> None:
        qkv = step.buffers[op.qkv]
        queries = self._heads(qkv)[:, : op.q_heads]
        out = qkv.new_empty((qkv.shape[0], op.q_heads, self.program.kv_cache.head_dim))
        for tile in step.tiles[self._reading(op)]:
            mixed = attention.attend(tile, queries, self.keys[op.layer], self.values[op.layer], op.scale)
            out[tile.rows] = mixed.to(out.dtype)
        step.buffers[op.out] = out.flatten(1)

    def _activation_mul(self, op: ActivationMul, step: _Step) -> None:
        gate, up = step.buffers[op.x].chunk(2, dim=-1)
        step.buffers[op.out] = torch.nn.functional.silu(gate).mul_(up)

    def _add(self, op: Add, step: _Step) -> None:
        step.buffers[op.out] = step.buffers[op.x] + step.buffers[op.y]

    def _select_rows(self, op: SelectRows, step: _Step) -> None:
        step.buffers[op.out] = step.buffers[op.x].index_select(0, step.logits_rows)

    def _lm_head(self, op: LmHead, step: _Step) -> None:
        step.buffers[op.out] = self._linears[op.weight](step.buffers[op.x]).float()

    def _heads(self, qkv: Tensor) -> Tensor:
        """[T, width] → [T, heads, head_dim], a view."""
        head_dim = self.program.kv_cache.head_dim
        return qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)


_RUN: dict[type[Op], Callable[[ReferenceBackend, Any, _Step], None]] = {
    Embed: ReferenceBackend._embed,
    RmsNorm: ReferenceBackend._rms_norm,
    HeadNorm: ReferenceBackend._head_norm,
    Linear: ReferenceBackend._linear,
    RopeStore: ReferenceBackend._rope_store,
    Attention: ReferenceBackend._attention,
    ActivationMul: ReferenceBackend._activation_mul,
    Add: ReferenceBackend._add,
    SelectRows: ReferenceBackend._select_rows,
    LmHead: ReferenceBackend._lm_head,
}


def _normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in float32, rounded once to x's dtype."""
    return torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def materialise(weight: Weight, tensors: Mapping[str, Tensor]) -> Tensor:
    """The tensor of a table entry: its sources joined and converted."""
    parts = []
    for name, rows in zip(weight.sources, weight.source_rows, strict=True):
        expected = (rows, *weight.shape[1:])
        tensor = tensors.get(name)
        if tensor is None or tuple(tensor.shape) != expected:
            raise WeightMismatch(name, expected, None if tensor is None else tuple(tensor.shape))
        parts.append(tensor.to(TORCH_DTYPE[weight.dtype]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
