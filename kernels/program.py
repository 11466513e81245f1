"""A model as a program: a flat list of typed ops over named buffers, which a backend interprets.

An op holds nothing but integers and floats: indices into the buffer table and the weight table, sizes, constants. Its
class has a fixed `code`, the dtypes too, so that a compiled interpreter reads the same list. Ops run in order; `NONE`
(-1) stands for an operand that isn't there.

Three row counts exist while a batch (`kernels/batch.py`) runs: T new tokens, L rows whose logits are wanted, and the
fixed rows of a weight. A buffer is [T, width] or [L, width], row-major.

Attention's buffer `qkv` holds heads side by side, each `head_dim` wide:

    | q_0 … q_{q_heads-1} | k_0 … k_{kv_heads-1} | v_0 … v_{kv_heads-1} |

and query head h reads KV head h // (q_heads / kv_heads).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

#: Index of an operand that isn't there.
NONE = -1

#: Tokens of one KV block.
BLOCK_SIZE = 32


class DType(IntEnum):
    """Element types; the numbers are part of the format."""

    FLOAT32 = 0
    BFLOAT16 = 1

    @property
    def label(self) -> str:
        """The name in numerics ids and on the command line: `float32`, `bfloat16`."""
        return self.name.lower()

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.FLOAT32 else 2


class Rows(IntEnum):
    """How many rows a buffer has."""

    TOKENS = 0
    LOGITS = 1


class Activation(IntEnum):
    """Element-wise functions of `ActivationMul`."""

    SILU = 0


class OpCode(IntEnum):
    """The number of each op class; part of the format."""

    EMBED = 1
    RMS_NORM = 2
    HEAD_NORM = 3
    LINEAR = 4
    ROPE_STORE = 5
    ATTENTION = 6
    ACTIVATION_MUL = 7
    ADD = 8
    SELECT_ROWS = 9
    LM_HEAD = 10
    LINEAR_ADD = 11
    LINEAR_ACTIVATION_MUL = 12


@dataclass(frozen=True, slots=True)
class Buffer:
    """A table entry: an activation of `width` columns."""

    name: str
    rows: Rows
    width: int
    dtype: DType


@dataclass(frozen=True, slots=True)
class Weight:
    """A table entry: a constant, made of one or more tensors of the checkpoint joined along their first dimension.

    `dtype` is what the program computes with; a backend converts from what the checkpoint holds.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    sources: tuple[str, ...]
    #: First dimensions of the sources, which add up to `shape[0]`.
    source_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Embed:
    """out[t] = weight[token_ids[t]]; weight [vocab, width]."""

    code: ClassVar[OpCode] = OpCode.EMBED
    weight: int
    out: int


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """out = x / sqrt(mean(x²) + eps) · weight, per row, in float32, rounded once; weight [width]."""

    code: ClassVar[OpCode] = OpCode.RMS_NORM
    x: int
    weight: int
    out: int
    eps: float


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """`RmsNorm` of each of the heads first_head … first_head + heads - 1 of `qkv`, in place; weight [head_dim]."""

    code: ClassVar[OpCode] = OpCode.HEAD_NORM
    qkv: int
    weight: int
    first_head: int
    heads: int
    eps: float


@dataclass(frozen=True, slots=True)
class Linear:
    """out = x · weightᵀ + bias; weight [width of out, width of x], bias [width of out] or `NONE`."""

    code: ClassVar[OpCode] = OpCode.LINEAR
    x: int
    weight: int
    bias: int
    out: int


@dataclass(frozen=True, slots=True)
class RopeStore:
    """Rotates the q and k heads of `qkv` in place, then stores k and v in the blocks of `layer`, from `store_from` on.

    A head (a, b), split in halves, becomes (a·cos - b·sin, b·cos + a·sin), with row `position` of the float32 tables
    `cos` and `sin` [max positions, head_dim / 2] (RoFormer, arXiv:2104.09864, in the half-split order of GPT-NeoX).
    """

    code: ClassVar[OpCode] = OpCode.ROPE_STORE
    qkv: int
    cos: int
    sin: int
    layer: int
    q_heads: int


@dataclass(frozen=True, slots=True)
class Attention:
    """out = softmax(scale · q·Kᵀ) · V over the blocks of `layer`, causal; out [T or L, q_heads · head_dim].

    A token at position p sees positions 0 … p, or the last `window` of them if `window` is above 0. Of `qkv`, which has
    as many rows as `out`, only the queries are read: keys and values come from the blocks.
    """

    code: ClassVar[OpCode] = OpCode.ATTENTION
    qkv: int
    out: int
    layer: int
    q_heads: int
    scale: float
    window: int


@dataclass(frozen=True, slots=True)
class ActivationMul:
    """out = activation(x[:, :width]) · x[:, width:], where width is out's (gated unit, arXiv:2002.05202)."""

    code: ClassVar[OpCode] = OpCode.ACTIVATION_MUL
    x: int
    out: int
    activation: Activation


@dataclass(frozen=True, slots=True)
class Add:
    """out = x + y; `out` may be `x`."""

    code: ClassVar[OpCode] = OpCode.ADD
    x: int
    y: int
    out: int


@dataclass(frozen=True, slots=True)
class SelectRows:
    """out[l] = x[logits_rows[l]]: from T rows to L."""

    code: ClassVar[OpCode] = OpCode.SELECT_ROWS
    x: int
    out: int


@dataclass(frozen=True, slots=True)
class LmHead:
    """out = x · weightᵀ, [L, vocab], in float32 whatever the program's dtype."""

    code: ClassVar[OpCode] = OpCode.LM_HEAD
    x: int
    weight: int
    out: int


@dataclass(frozen=True, slots=True)
class LinearAdd:
    """out = out + (x · weightᵀ + bias): `Linear` and `Add` in one, made by `kernels/fusion.py`."""

    code: ClassVar[OpCode] = OpCode.LINEAR_ADD
    x: int
    weight: int
    bias: int
    out: int


@dataclass(frozen=True, slots=True)
class LinearActivationMul:
    """`Linear` and `ActivationMul` in one, made by `kernels/fusion.py`; weight [2 · width of out, width of x]."""

    code: ClassVar[OpCode] = OpCode.LINEAR_ACTIVATION_MUL
    x: int
    weight: int
    bias: int
    out: int
    activation: Activation


Op = (
    Embed
    | RmsNorm
    | HeadNorm
    | Linear
    | RopeStore
    | Attention
    | ActivationMul
    | Add
    | SelectRows
    | LmHead
    | LinearAdd
    | LinearActivationMul
)


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The shape of the paged KV cache that a program reads and writes."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: DType
    block_size: int = BLOCK_SIZE

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: keys and values of `block_size` tokens in all layers."""
        return 2 * self.layers * self.kv_heads * self.block_size * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Program:
    """Ops in the order they run, the tables that they index, and the cache that they page through."""

    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    weights: tuple[Weight, ...]
    kv_cache: KVCacheSpec
    vocab_size: int
    #: Positions that the rotary tables hold.
    max_positions: int
    dtype: DType
    #: Buffer that holds the logits when the last op has run.
    output: int


class ProgramBuilder:
    """Collects ops and fills the tables: each distinct buffer or weight gets the next index."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.buffers: list[Buffer] = []
        self.weights: list[Weight] = []

    def buffer(self, name: str, width: int, dtype: DType, rows: Rows = Rows.TOKENS) -> int:
        """Index of a new buffer."""
        self.buffers.append(Buffer(name, rows, width, dtype))
        return len(self.buffers) - 1

    def weight(self, name: str, shape: tuple[int, ...], dtype: DType, sources: dict[str, int] | None = None) -> int:
        """Index of a new weight.

        `sources` maps the names of the tensors it is joined from to their first dimensions; left out, the weight's
        own name is the tensor's.
        """
        parts = {name: shape[0]} if sources is None else sources
        assert sum(parts.values()) == shape[0], (name, shape, parts)
        self.weights.append(Weight(name, shape, dtype, tuple(parts), tuple(parts.values())))
        return len(self.weights) - 1

    def add(self, op: Op) -> None:
        """Appends an op."""
        self.ops.append(op)

    def build(self, kv_cache: KVCacheSpec, vocab_size: int, max_positions: int, dtype: DType, output: int) -> Program:
        """The finished program."""
        tables = (tuple(self.ops), tuple(self.buffers), tuple(self.weights))
        return Program(*tables, kv_cache, vocab_size, max_positions, dtype, output)
