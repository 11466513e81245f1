"""The LM head's weights in digits of 8 bits, by which the compiled library finds a row's largest logit (`screen.h`).

A greedy draw needs the largest of the logits and no other. Dot products of digits cost half of the real ones and read
half of the bytes, and a bound on what they miss rules out nearly all columns. The few that are left are computed as in
whole rows, so the token is the same to the last tie.

    | digits: int8 [panel][depth / 4][64][4] | start: int32 | scale, error, norm: float32 | signs, mix: float32 |

A column w is rotated to w' and split into scale · digits and a rest: `error` bounds the rest's norm, `norm` that of w'.
`start` is -128 · Σ digits, which takes back the 128 that is added to a row's digits to make them unsigned. The rotation
multiplies by `signs` [width], transforms each 2ᵏ places that follow each other by a Hadamard matrix, where width is 2ᵏ
times an odd number, and mixes across these by `mix` [odd][odd].
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

_PANEL, _QUAD, _LARGEST_DIGIT = 64, 4, 127
#: Wider odd parts would take longer to mix than they save, and round more than `kRoundings` in screen.h allows for.
_MAX_ODD_PART = 64
#: The library counts words of the weights, and sums products of digits, in 32 bits.
_MAX_SIZE, _MAX_WIDTH = 2**31, 2**17
#: Relative roundings in a norm, by far; a norm so large that logits could overflow, which no bound foresees; an element
#: so small that squares of digits' errors could underflow.
_ROUNDING, _LONGEST, _SMALLEST = 1e-4, 1e18, 1e-12
_ROWS_AT_ONCE = 4096


def can_screen(rows: int, width: int) -> bool:
    """Whether a weight of this shape can have a screen."""
    return _odd_part(width) <= _MAX_ODD_PART and width < _MAX_WIDTH and rows * (width + 1) < _MAX_SIZE


def nbytes(rows: int, width: int) -> int:
    """Bytes of the screen of a weight [rows, width]."""
    padded = _round_up(rows, _PANEL)
    return padded * (_round_up(width, _QUAD) + 16) + 4 * (width + _odd_part(width) ** 2)


def make_screen(weight: Float32) -> npt.NDArray[np.uint8]:
    """The screen of a weight [rows, width], whose elements are as the product takes them."""
    rows, width = weight.shape
    padded = _round_up(rows, _PANEL)
    digits = np.zeros((padded, _round_up(width, _QUAD)), np.int8)
    scale, error, norm = (np.zeros(padded, np.float32) for _ in range(3))
    for begin in range(0, rows, _ROWS_AT_ONCE):
        part = slice(begin, min(begin + _ROWS_AT_ONCE, rows))
        digits[part, :width], scale[part], error[part], norm[part] = _split(weight[part])
    start = -128 * digits.sum(axis=1, dtype=np.int32)
    panels = digits.reshape(-1, _PANEL, digits.shape[1] // _QUAD, _QUAD).transpose(0, 2, 1, 3)
    parts = (np.ascontiguousarray(panels), start, scale, error, norm, _signs(width), _mix(width))
    return np.concatenate([part.view(np.uint8).ravel() for part in parts])


def _split(weight: Float32) -> tuple[npt.NDArray[np.int8], Float32, Float32, Float32]:
    """Digits, scale, error and norm of some rows. One not finite, very long or tiny is all error: it always stays."""
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = np.linalg.norm(weight, axis=1)
    sizes = np.abs(weight).max(axis=1)
    usable = (lengths < _LONGEST) & ((sizes > _SMALLEST) | (sizes == 0))  # and not NaN
    rotated = rotate(np.where(usable[:, None], weight, np.float32(0)))
    largest = np.abs(rotated).max(axis=1)
    scale = np.where(largest > 0, largest / _LARGEST_DIGIT, 1).astype(np.float32)
    digits = np.rint(rotated / scale[:, None])
    error = np.linalg.norm(rotated - digits * scale[:, None], axis=1) * (1 + _ROUNDING)
    norm = np.linalg.norm(rotated, axis=1) * (1 + _ROUNDING)
    return digits.astype(np.int8), scale, np.where(usable, error, np.inf).astype(np.float32), norm.astype(np.float32)


def rotate(rows: Float32) -> Float32:
    """Rows [n, width] times the rotation."""
    count, width = rows.shape
    odd = _odd_part(width)
    turned = rows * _signs(width)
    half = 1
    while half < width // odd:
        pairs = turned.reshape(count, -1, 2, half)
        turned = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        half *= 2
    mixed: Float32 = np.matmul(_mix(width), turned.reshape(count, odd, -1))
    return mixed.reshape(count, width)


def _signs(width: int) -> Float32:
    """Plus or minus one, scrambled by multipliers of xxHash."""
    words = np.arange(1, width + 1, dtype=np.uint32) * np.uint32(2654435761)
    words = (words ^ (words >> np.uint32(15))) * np.uint32(2246822519)
    signs: Float32 = np.where(words >> np.uint32(31), 1, -1).astype(np.float32)
    return signs


def _mix(width: int) -> Float32:
    """The matrix of the discrete cosine transform, orthogonal but for the scale that Hadamard's matrices lack."""
    size = _odd_part(width)
    rows, columns = np.arange(size)[:, None], np.arange(size)[None, :]
    matrix = np.cos(np.pi * (2 * columns + 1) * rows / (2 * size)) * np.sqrt(2 / size)
    matrix[0] /= np.sqrt(2)
    mixing: Float32 = (matrix / np.sqrt(width // size)).astype(np.float32)
    return mixing


def _odd_part(width: int) -> int:
    return width // (width & -width)


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to
