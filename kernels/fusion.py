"""Joins pairs of ops where a product's result is only passed on, so that a compiled backend never writes it to memory.

    Linear → t, Add(h, t) → h            becomes LinearAdd → h
    Linear → t, ActivationMul(t) → u     becomes LinearActivationMul → u

The bits stay what they were: a fused op rounds between its two halves as if the result had been written.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from batonq.kernels.program import ActivationMul, Add, Linear, LinearActivationMul, LinearAdd, Op, Program


def fuse(program: Program) -> Program:
    """The program with every pair joined that can be; the tables are the same."""
    passed_on = _passed_on(program)
    ops: list[Op] = []
    for op in program.ops:
        fused = _joined(ops[-1], op) if ops and isinstance(ops[-1], Linear) and ops[-1].out in passed_on else None
        if fused is not None:
            ops.pop()
        ops.append(fused or op)
    return replace(program, ops=tuple(ops))


def _joined(linear: Linear, op: Op) -> Op | None:
    x, weight, bias = linear.x, linear.weight, linear.bias
    match op:
        case Add(x=hidden, y=linear.out, out=out) if hidden == out and out != x:
            return LinearAdd(x, weight, bias, out)
        case ActivationMul(x=linear.out, out=out, activation=activation) if out != x:
            return LinearActivationMul(x, weight, bias, out, activation)
    return None


def _passed_on(program: Program) -> set[int]:
    """Buffers that are read nowhere but by the `Add` or `ActivationMul` that follows a `Linear` which wrote them."""
    followers: Counter[int] = Counter()
    for linear, op in zip(program.ops, program.ops[1:], strict=False):
        if isinstance(linear, Linear) and _joined(linear, op) is not None:
            followers[linear.out] += 1
    reads = Counter(buffer for op in program.ops for buffer in _read_by(op))
    return {buffer for buffer, count in followers.items() if reads[buffer] == count}


def _read_by(op: Op) -> tuple[int, ...]:
    """Buffers that an op reads."""
    names = [name for name in ("x", "y", "qkv") if hasattr(op, name)]
    return tuple(getattr(op, name) for name in names)
