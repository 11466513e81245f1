"""A linear layer whose result for a row doesn't depend on the rows beside it.

oneDNN's prepacked matrix product keeps one accumulator chain per output element and is 1.3 to 4 times as fast as
`torch.nn.functional.linear` on CPUs; where torch was built without it, that function is what remains.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: oneDNN chooses another kernel, with another order of summation, for a single row; from two rows on all agree.
MIN_ROWS = 2


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch build and CPU have the prepacked product for `dtype`."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_onednn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


class PackedLinear:
    """y = x · weightᵀ + bias for weight [N, K], bias [N] or None; packs the weight and doesn't keep the original."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._width = weight.shape[0]
        self._bias = bias
        self._packed = can_pack(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] → [M, N], in x's dtype."""
        rows = x.shape[0]
        if rows == 0:
            return x.new_empty((0, self._width))
        if rows < MIN_ROWS:
            x = x.expand(MIN_ROWS, -1)
        x = x.contiguous()
        if self._packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            y = torch.nn.functional.linear(x, self._weight, self._bias)
        return y[:rows]
