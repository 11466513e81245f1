"""Rotary tables: the cosines and sines of every position, in float32, made once when a model is loaded.

Angles are products of float32 positions and float32 frequencies, because models were trained with those: computed
more exactly, far positions would be turned otherwise than the weights expect.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from batonq.engine.models.config import RopeConfig

Float32 = npt.NDArray[np.float32]


def rope_tables(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Float32, Float32]:
    """Cosines and sines [max_positions, head_dim / 2]."""
    positions = np.arange(max_positions, dtype=np.float32)
    angles = np.outer(positions, inverse_frequencies(rope, head_dim)).astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Float32:
    """Radians a position, [head_dim / 2]: theta^(-2i / head_dim), stretched as `rope.kind` says.

    `linear` divides all by the factor (position interpolation, arXiv:2306.15595). `llama3` divides only long
    wavelengths and blends between (Llama 3.1; transformers' `_compute_llama3_parameters` is the reference).
    """
    frequencies: npt.NDArray[np.float64] = 1.0 / rope.theta ** (np.arange(0, head_dim, 2) / head_dim)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        turns = rope.original_max_positions * frequencies / (2 * math.pi)  # over the positions of pre-training
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        frequencies = frequencies * (blend + (1.0 - blend) / rope.factor)
    return frequencies.astype(np.float32)
