"""The sampler's contract in C++ (`kernels/cpu/sampling.cpp`): parameters go there as flat arrays, one call a step."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from batonq.kernels.adjustments import Adjustment
from batonq.kernels.cpu_library import Team, library
from batonq.kernels.errors import BackendUnavailable, InvalidLogits
from batonq.kernels.logprobs import TokenLogprob
from batonq.kernels.sampling import Drawn, SamplingBatch, unusable

Logits = npt.NDArray[np.float32]


class _Arrays(ctypes.Structure):
    """A struct of pointers to arrays, which it keeps alive."""

    def __init__(self, **arrays: npt.NDArray[Any]) -> None:
        super().__init__(**{name: array.ctypes.data for name, array in arrays.items()})
        self.arrays = arrays


def _pointers(names: str) -> list[tuple[str, type[ctypes.c_void_p]]]:
    return [(name, ctypes.c_void_p) for name in names.split()]


class _SamplingArrays(_Arrays):
    _fields_ = _pointers("temperature top_p min_p top_k position seed")


class _AdjustmentArrays(_Arrays):
    _fields_ = _pointers(
        "allowed_start banned_start bias_start history_start masked allowed banned bias_ids history_ids history_counts "
        "bias repetition_penalty presence_penalty frequency_penalty"
    )


class _LogprobArrays(ctypes.Structure):
    _fields_ = (
        *_pointers("rows token_ids num_top"),
        ("width", ctypes.c_int64),
        *_pointers("largest logprobs top_logprobs ranks top_ids"),
    )


class CpuSampler:
    """Samples on a team's threads with an instruction set's kernels; every set and any number of threads draws alike.

    Raises BackendUnavailable if the instruction set isn't there.
    """

    def __init__(self, team: Team, isa: str) -> None:
        self._team = team  # which must outlive the handle
        self._library = library()
        self._handle = self._library.batonq_sampler_create(team.handle, isa.encode())
        if not self._handle:
            raise BackendUnavailable(f"no instruction set {isa} here, or no memory for a sampler")

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.batonq_sampler_destroy(self._handle)
            self._handle = None

    def sample(self, logits: Logits, params: SamplingBatch) -> list[Drawn]:
        """A token id for each row of logits [L, V], or what is wrong with that row.

        Raises IndexError for an id of an adjustment that the vocabulary does not have.
        """
        rows, vocabulary = logits.shape
        tokens, largest = np.empty(rows, np.int32), np.empty(rows, np.float32)
        arrays = _SamplingArrays(
            temperature=np.array(params.temperature, np.float64),
            top_p=np.array(params.top_p, np.float64),
            min_p=np.array(params.min_p, np.float64),
            top_k=np.array(params.top_k, np.int64),
            position=np.array(params.position, np.int64),
            seed=np.array(params.seed, np.uint64),
        )
        adjustments = _adjustment_arrays(params.adjustments, vocabulary) if any(params.adjustments) else None
        logits = np.ascontiguousarray(logits)
        if not self._library.batonq_sample(
            self._handle,
            logits.ctypes.data,
            rows,
            vocabulary,
            ctypes.byref(arrays),
            None if adjustments is None else ctypes.byref(adjustments),
            tokens.ctypes.data,
            largest.ctypes.data,
        ):
            raise MemoryError(f"no memory to sample from {vocabulary} logits")
        drawn: list[Drawn] = [*tokens.tolist()]
        for row in np.flatnonzero(~np.isfinite(largest)).tolist():
            drawn[row] = unusable(row, float(largest[row])) or drawn[row]
        return drawn

    def token_logprobs(
        self, logits: Logits, rows: Sequence[int], token_ids: Sequence[int], num_top: Sequence[int]
    ) -> list[TokenLogprob | InvalidLogits]:
        """What `rows` of logits [L, V] say of one token each and of their `num_top` most likely tokens.

        A row that has no largest finite value gives its error. Raises IndexError for a token, row or number that is
        not there.
        """
        count, vocabulary, width = len(rows), logits.shape[1], max(num_top, default=0)
        asked = {
            "rows": _within(len(logits), np.array(rows, np.int64)),
            "token_ids": _within(vocabulary, np.array(token_ids, np.int32)),
            "num_top": _within(vocabulary + 1, np.array(num_top, np.int32)),
        }
        found = {
            "largest": np.empty(count, np.float32),
            "logprobs": np.empty(count, np.float32),
            "ranks": np.empty(count, np.int32),
            "top_ids": np.empty((count, width), np.int32),
            "top_logprobs": np.empty((count, width), np.float32),
        }
        pointers = {name: array.ctypes.data for name, array in (asked | found).items()}
        arrays = _LogprobArrays(width=width, **pointers)
        logits = np.ascontiguousarray(logits)
        if not self._library.batonq_token_logprobs(
            self._handle, logits.ctypes.data, count, vocabulary, ctypes.byref(arrays)
        ):
            raise MemoryError(f"no memory for log probabilities of {vocabulary} logits")
        largest, logprobs, ranks, top_ids, top_logprobs = (array.tolist() for array in found.values())
        usable = np.isfinite(found["largest"]).tolist()
        return [
            (logprobs[i], ranks[i], tuple(zip(top_ids[i][:top], top_logprobs[i][:top], strict=True)))
            if usable[i]
            else InvalidLogits(rows[i], largest[i])
            for i, top in enumerate(num_top)
        ]


def _adjustment_arrays(adjustments: Sequence[Adjustment | None], vocabulary: int) -> _AdjustmentArrays:
    each = [adjustment or _NOTHING for adjustment in adjustments]
    banned = [[token for token in one.banned if token < vocabulary] for one in each]
    allowed = [one.allowed or () for one in each]
    return _AdjustmentArrays(
        allowed_start=_starts(allowed),
        banned_start=_starts(banned),
        bias_start=_starts([one.bias for one in each]),
        history_start=_starts([one.history_ids for one in each]),
        masked=np.array([one.allowed is not None for one in each], np.bool_),
        allowed=_within(vocabulary, _joined(allowed)),
        banned=_within(vocabulary, _joined(banned)),
        bias_ids=_within(vocabulary, _joined([one.bias for one in each])),
        history_ids=_within(vocabulary, np.concatenate([one.history_ids for one in each])),
        history_counts=np.concatenate([one.history_counts for one in each]),
        bias=np.array([value for one in each for value in one.bias.values()], np.float64),
        repetition_penalty=np.array([one.repetition_penalty for one in each], np.float64),
        presence_penalty=np.array([one.presence_penalty for one in each], np.float64),
        frequency_penalty=np.array([one.frequency_penalty for one in each], np.float64),
    )


_NOTHING = Adjustment()


def _starts(parts: Sequence[Any]) -> npt.NDArray[np.int64]:
    """Where each part begins when all are joined, and where the last ends."""
    starts = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=starts[1:])
    return starts


def _joined(parts: Iterable[Iterable[int]]) -> npt.NDArray[np.int32]:
    return np.array([token for part in parts for token in part], np.int32)


def _within(bound: int, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The ids themselves. Raises IndexError for one that is not in [0, bound): the library doesn't look."""
    if len(ids) and not 0 <= ids.min() <= ids.max() < bound:
        raise IndexError(f"ids from {ids.min()} to {ids.max()} where {bound} exist")
    return ids
