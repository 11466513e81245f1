"""The sampler's contract in torch: the oracle of the compiled one, and what draws where there is no compiler.

What is kept is a prefix of the order, so the top 64 tokens decide most rows, and a token whose z is more than the
largest possible noise below the best sum so far needs no noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batonq.kernels.adjustments import Adjustment
from batonq.kernels.errors import InvalidLogits
from batonq.kernels.logprobs import TokenLogprob
from batonq.kernels.philox import MASK, MAX_GUMBEL, MULTIPLIERS, PURPOSE_SAMPLE, RNG_VERSION, ROUNDS, WEYL
from batonq.kernels.sampling import MASS_SCALE, Drawn, SamplingBatch, unusable

#: How many of the highest logits are looked at; rows that need more go on to the next width, then to the vocabulary.
WIDTHS = (64, 1024)

#: Covers the rounding of logarithms where noise is bounded.
_GUMBEL_MARGIN = 1e-6

#: A token further than this below the best sum can't win.
_REACH = MAX_GUMBEL + _GUMBEL_MARGIN

#: Logits that are held in float64 at once when whole rows are looked at.
_CHUNK = 400_000

#: Rows whose log probabilities are computed at once, in float64.
_LOGPROB_ROWS = 8


def sample(logits: npt.NDArray[np.float32], params: SamplingBatch) -> list[Drawn]:
    """A token id for each row of logits [L, V], or what is wrong with that row."""
    rows = adjusted(torch.from_numpy(logits), params.adjustments)
    largest, first_largest = rows.max(dim=1)
    tokens: list[int] = first_largest.tolist()
    errors = [unusable(row, value) for row, value in enumerate(largest.tolist())]
    pending = [row for row, error in enumerate(errors) if error is None and params.temperature[row] > 0.0]
    vocabulary = rows.shape[1]
    for width in (*(width for width in WIDTHS if width < vocabulary - 1), vocabulary):
        if not pending:
            break
        rows_at_once = len(pending) if width < vocabulary else max(1, _CHUNK // width)
        wider = []
        for start in range(0, len(pending), rows_at_once):
            wider += _Top(rows, largest, params, pending[start : start + rows_at_once], width).draw(tokens)
        pending = wider
    return [token if error is None else error for token, error in zip(tokens, errors, strict=True)]


class _Top:
    """The `width` highest logits of some rows [R], in order; all of them if `width` is the vocabulary."""

    def __init__(self, logits: Tensor, largest: Tensor, params: SamplingBatch, rows: list[int], width: int) -> None:
        self.rows = rows
        self.vocabulary = logits.shape[1]
        self.width = width
        self.logits = logits if len(rows) == len(logits) else logits[rows]
        self.largest = largest[rows].double().unsqueeze(1)
        self.temperature = _column([params.temperature[row] for row in rows])
        self.top_p = _column([params.top_p[row] for row in rows])
        self.min_p_bound = _column([_log(params.min_p[row]) for row in rows])
        kept = [params.top_k[row] if 0 < params.top_k[row] < self.vocabulary else self.vocabulary for row in rows]
        self.kept = torch.tensor(kept).unsqueeze(1)
        self.position = torch.tensor([params.position[row] for row in rows]).unsqueeze(1)
        self.key0 = torch.tensor([params.seed[row] & MASK for row in rows]).unsqueeze(1)
        self.key1 = torch.tensor([params.seed[row] >> 32 for row in rows]).unsqueeze(1)
        self.values, self.ids, self.next_value = self._ordered()
        self.z = (self.values.double() - self.largest) / self.temperature

    def draw(self, tokens: list[int]) -> list[int]:
        """Fills in `tokens` of the rows that this width decides; returns the others."""
        prefix, known = self._prefix()
        unfiltered = (self.kept == self.vocabulary) & (self.top_p >= 1.0)
        inside = torch.arange(self.width) < prefix
        sums = self.z + _gumbel(_words(self.position, self.ids, self.key0, self.key1))
        sums.masked_fill_(~inside, -math.inf)
        best = sums.amax(dim=1, keepdim=True)
        drawn = torch.where(sums == best, self.ids, self.vocabulary).amin(dim=1).tolist()
        # Without top_k and top_p the order past this width doesn't matter, only which tokens could still win.
        bound = torch.maximum(best - _REACH, self.min_p_bound)
        reaches_on = (unfiltered & (prefix > self.width) & (self.z[:, -1:] >= bound)).flatten().tolist()
        wider = []
        for index, is_decided in enumerate((known | unfiltered).flatten().tolist()):
            if not is_decided:
                wider.append(self.rows[index])
                continue
            token = drawn[index]
            tokens[self.rows[index]] = self._beyond(index, token, float(best[index])) if reaches_on[index] else token
        return wider

    def _ordered(self) -> tuple[Tensor, Tensor, Tensor]:
        """Values and ids [R, width] in the order of the contract, and the value [R, 1] that comes next."""
        if self.width == self.vocabulary:
            values, ids = self.logits.sort(dim=1, descending=True, stable=True)
            return values, ids, values.new_full((len(self.rows), 1), math.nan)
        # topk leaves equal values in any order: by id first, then stably by value.
        ids = self.logits.topk(self.width + 1, dim=1).indices.sort(dim=1).values
        values, order = self.logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
        return values[:, :-1], ids.gather(1, order)[:, :-1], values[:, -1:]

    def _prefix(self) -> tuple[Tensor, Tensor]:
        """How many tokens are kept [R, 1], and whether that and their ids are known; above `width` means more."""
        prefix = self.kept
        known = torch.ones_like(prefix, dtype=torch.bool)
        nucleus = self.top_p < 1.0
        if bool(nucleus.any()):
            masses = mass(self.z).masked_fill_(torch.arange(self.width) >= self.kept, 0)
            total = masses.sum(dim=1, keepdim=True)
            beyond = nucleus & (self.kept == self.vocabulary) & (self.width < self.vocabulary)
            for index in beyond.flatten().nonzero().flatten().tolist():
                total[index] = mass(self._z_of_row(index)).sum()
            reached = masses.cumsum(dim=1).double() >= self.top_p * total.double()
            found = reached.any(dim=1, keepdim=True) & ((self.kept <= self.width) | (self.kept == self.vocabulary))
            length = reached.int().argmax(dim=1, keepdim=True) + 1
            prefix = torch.where(nucleus & found, torch.minimum(prefix, length), prefix)
            known &= found | ~nucleus
        likely = (self.z >= self.min_p_bound).sum(dim=1, keepdim=True)
        prefix = torch.where(likely < self.width, torch.minimum(prefix, likely), prefix)
        known &= prefix <= self.width
        # A value that is equal on both sides of the border: the lowest ids may lie beyond it.
        last = self.values.gather(1, prefix.clamp(max=self.width) - 1)
        return prefix, known & (last != self.next_value)

    def _beyond(self, index: int, token: int, best: float) -> int:
        """The winner of one row among all its tokens, when `token` with the sum `best` is that of the highest.

        A token past the highest needs at least the noise `best` less the lowest of their z. Few words are large enough
        for that, so all words are drawn, but logarithms are taken of few.
        """
        position, key0, key1 = self.position[index], self.key0[index], self.key1[index]
        words = _all_words(position, self.vocabulary, key0, key1)
        ids = (words >= _least_word(best - float(self.z[index, -1]))).nonzero().flatten()
        z = self._z_of_row(index, ids)
        ids, z = ids[z >= self.min_p_bound[index]], z[z >= self.min_p_bound[index]]
        sums = z + _gumbel(words[ids])
        if len(ids) == 0 or (top := float(sums.max())) < best:
            return token
        rival = int(ids[sums.argmax()])
        return rival if top > best else min(rival, token)

    def _z_of_row(self, index: int, ids: Tensor | slice = slice(None)) -> Tensor:
        return self.logits[index, ids].double().sub_(self.largest[index]).div_(self.temperature[index])


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0.0 else -math.inf


def mass(z: Tensor) -> Tensor:
    """The integer masses of z."""
    return z.exp().mul_(MASS_SCALE).long()  # conversion to an integer drops the fraction


def _gumbel(words: Tensor) -> Tensor:
    """The noise that 32-bit words give, float64."""
    return words.double().add_(0.5).mul_(2.0**-32).log_().neg_().log_().neg_()


def _least_word(gumbel: float) -> int:
    """A lower bound of the words whose noise is at least `gumbel`."""
    u = math.exp(-math.exp(min(_GUMBEL_MARGIN - gumbel, 700.0)))
    return max(0, int(u * 2.0**32) - 1)


def _words(position: Tensor, ids: Tensor, key0: Tensor, key1: Tensor) -> Tensor:
    """The random words of tokens, int64; the others broadcast against `ids`."""
    words = _philox(position, ids >> 2, key0, key1)
    return torch.stack(words, -1).gather(-1, (ids & 3).unsqueeze(-1)).squeeze(-1)


def _all_words(position: Tensor, vocabulary: int, key0: Tensor, key1: Tensor) -> Tensor:
    """The random words of one row's whole vocabulary."""
    words = _philox(position, torch.arange((vocabulary + 3) // 4), key0, key1)
    return torch.stack(words, -1).flatten()[:vocabulary]


def _philox(position: Tensor, block: Tensor, key0: Tensor, key1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`philox.philox4x32` of a draw's counters and keys, on int64 tensors that broadcast against `block`.

    Within the rounds c1 and c3 keep the wrapped 64-bit products, whose high halves fall to the mask that follows: only
    words that are multiplied must be clean.
    """
    c0, c1, c2, c3 = position, block, torch.tensor(PURPOSE_SAMPLE), torch.tensor(RNG_VERSION)
    for _ in range(ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = ((product1 >> 32) ^ c1 ^ key0) & MASK
        c2 = ((product0 >> 32) ^ c3 ^ key1) & MASK
        c1, c3 = product1, product0
        key0, key1 = (key0 + WEYL[0]) & MASK, (key1 + WEYL[1]) & MASK
    return c0, c1 & MASK, c2, c3 & MASK


def adjusted(logits: Tensor, adjustments: Sequence[Adjustment | None]) -> Tensor:
    """The logits [L, V] float32 after each row's adjustment; themselves if there is none, else a copy."""
    if not any(adjustments):
        return logits
    logits = logits.clone()
    for row, adjustment in zip(logits, adjustments, strict=True):
        if adjustment is not None:
            _mask(row, adjustment)
            _add_bias(row, adjustment.bias)
            _penalise(row, adjustment)
    return logits


def _mask(row: Tensor, adjustment: Adjustment) -> None:
    if adjustment.allowed is not None:
        allowed = torch.tensor(adjustment.allowed)
        kept = row[allowed]
        row.fill_(-math.inf)
        row[allowed] = kept
    banned = [token for token in adjustment.banned if token < len(row)]
    if banned:
        row[torch.tensor(banned)] = -math.inf


def _add_bias(row: Tensor, bias: Mapping[int, float]) -> None:
    if bias:
        ids = torch.tensor(list(bias))
        row[ids] = row[ids].double().add_(torch.tensor(list(bias.values()), dtype=torch.float64)).float()


def _penalise(row: Tensor, adjustment: Adjustment) -> None:
    if len(adjustment.history_ids) == 0:
        return
    ids = torch.from_numpy(adjustment.history_ids).long()
    counts = torch.from_numpy(adjustment.history_counts).double()
    value = row[ids].double()
    value = torch.where(value > 0, value / adjustment.repetition_penalty, value * adjustment.repetition_penalty)
    value -= adjustment.frequency_penalty * counts
    value -= adjustment.presence_penalty * (counts > 0)
    row[ids] = value.float()


def token_logprobs(
    logits: npt.NDArray[np.float32], rows: Sequence[int], token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob | InvalidLogits]:
    """What `rows` of logits [L, V] say of one token each and of their `num_top` most likely tokens.

    A row that has no largest finite value gives its error.
    """
    results: list[TokenLogprob | InvalidLogits] = []
    for start in range(0, len(rows), _LOGPROB_ROWS):
        chunk = torch.from_numpy(logits[list(rows[start : start + _LOGPROB_ROWS])])
        largest = chunk.amax(dim=1).double()
        total = mass(chunk.double() - largest.unsqueeze(1)).sum(dim=1).double() / MASS_SCALE
        for index, (row, m, log_total) in enumerate(zip(chunk, largest, total.log(), strict=True), start):
            value = float(m)
            results.append(
                _logprob(row, m, log_total, token_ids[index], num_top[index])
                if math.isfinite(value)
                else InvalidLogits(rows[index], value)
            )
    return results


def _logprob(row: Tensor, largest: Tensor, log_total: Tensor, token: int, num_top: int) -> TokenLogprob:
    value = row[token]
    rank = 1 + int((row > value).sum()) + int((row[:token] == value).sum())
    ids = _first(row, num_top)
    values = row[torch.tensor([token, *ids])].double()
    logprob, *top = ((values - largest) - log_total).float().tolist()
    return logprob, rank, tuple(zip(ids, top, strict=True))


def _first(row: Tensor, count: int) -> list[int]:
    """The first `count` tokens of the order."""
    if count == 0:
        return []
    least = row.topk(count).values[-1]  # topk leaves equal values in any order, so only the border is taken from it
    ids = (row >= least).nonzero().flatten()
    chosen: list[int] = ids[row[ids].sort(descending=True, stable=True).indices[:count]].tolist()
    return chosen
