"""Draws a token for each row of logits: filters, then the arg max of value plus noise, with no state and no neighbours.

The contract, for a row of float32 logits; every backend gives the same token for the same logits:

1. The request's adjustments, in this order; -inf stays -inf throughout:
   a. `allowed_token_ids`: every other logit becomes -inf.
   b. `bad_words`: a token that would complete one becomes -inf.
   c. `logit_bias`: logit = float32(float64(logit) + bias).
   d. `min_tokens`: while the output is shorter, tokens that end it become -inf.
   e. Penalties, for each token of output or (repetition penalty only) prompt, `count` being its occurrences in the
      output: v = float64(logit); v / repetition if v > 0, else v * repetition; less frequency * count; less presence
      if count > 0; logit = float32(v). Products and differences are rounded one by one (no fused multiply-add).
   Masks commute with the rest, so a, b and d may be done at once. The largest logit that is left must be finite, else
   the row is an error.
2. Temperature 0 takes the largest logit, the lowest id among equals, whatever else is set.
3. z = (logit - largest logit) / temperature, in float64. Tokens are ordered by descending logit, then ascending id.
4. `top_k` > 0 keeps the first k of that order.
5. `top_p` < 1 keeps the shortest prefix of what is left whose mass reaches `top_p` of the mass of what is left. A
   token's mass is the integer floor(exp(z) · 2⁴⁴), so that sums are the same in any order; the two sums are compared
   as float64: float(prefix) >= top_p · float(all).
6. `min_p` > 0 keeps z >= log(min_p).
7. The token with the largest z + gumbel(seed, position, id) is drawn (`kernels/philox.py`), the lowest id among equals.
   This draws from the softmax over what is left (Gumbel-max trick).

What is kept is always a prefix of the order. So the top 64 tokens decide most rows, and a token whose z is more than
the largest possible noise below the best sum so far needs no noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batonq.kernels.adjustments import Adjustment, adjusted
from batonq.kernels.errors import InvalidLogits, NoCandidates
from batonq.kernels.philox import MASK, MAX_GUMBEL, MULTIPLIERS, PURPOSE_SAMPLE, RNG_VERSION, ROUNDS, WEYL

#: How many of the highest logits are looked at; rows that need more go on to the next width, then to the vocabulary.
WIDTHS = (64, 1024)

#: Covers the rounding of logarithms where noise is bounded.
_GUMBEL_MARGIN = 1e-6

#: A token further than this below the best sum can't win.
_REACH = MAX_GUMBEL + _GUMBEL_MARGIN

#: The mass of the most likely token.
MASS_SCALE = 2.0**44

#: Logits that are held in float64 at once when whole rows are looked at.
_CHUNK = 400_000


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Per row of the logits: parameters as in `engine/sampling_params.py`, and the absolute position to draw.

    `top_k` below 1 and `top_p` at 1 keep all. A row without adjustment has None.
    """

    temperature: Sequence[float]
    top_k: Sequence[int]
    top_p: Sequence[float]
    min_p: Sequence[float]
    seed: Sequence[int]
    position: Sequence[int]
    adjustments: Sequence[Adjustment | None]


def sample(logits: Tensor, params: SamplingBatch) -> list[int]:
    """A token id for each row of logits [L, V] float32.

    Raises `InvalidLogits` for the first row that holds NaN or +inf, `NoCandidates` for one with nothing but -inf.
    """
    logits = adjusted(logits, params.adjustments)
    largest, first_largest = logits.max(dim=1)
    for row, value in enumerate(largest.tolist()):
        if value == -math.inf:
            raise NoCandidates(row)
        if not math.isfinite(value):
            raise InvalidLogits(row, value)
    tokens: list[int] = first_largest.tolist()
    pending = [row for row, temperature in enumerate(params.temperature) if temperature > 0.0]
    for width in (*(width for width in WIDTHS if width < logits.shape[1] - 1), logits.shape[1]):
        if not pending:
            break
        rows_at_once = len(pending) if width < logits.shape[1] else max(1, _CHUNK // width)
        wider = []
        for start in range(0, len(pending), rows_at_once):
            wider += _Top(logits, largest, params, pending[start : start + rows_at_once], width).draw(tokens)
        pending = wider
    return tokens


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
        sums = self.z + _gumbel(_philox_first_word(self.position, self.ids, self.key0, self.key1))
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
        words = _philox_first_word(position, torch.arange(self.vocabulary), key0, key1)
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


def _philox_first_word(position: Tensor, ids: Tensor, key0: Tensor, key1: Tensor) -> Tensor:
    """x0 of `philox.philox4x32`, on int64 tensors that broadcast against `ids`.

    c1 and c3 keep the wrapped 64-bit products, whose high halves fall to the mask that follows: only words that are
    multiplied must be clean.
    """
    c0, c1, c2, c3 = position, ids, torch.tensor(PURPOSE_SAMPLE), torch.tensor(RNG_VERSION)
    for _ in range(ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = ((product1 >> 32) ^ c1 ^ key0) & MASK
        c2 = ((product0 >> 32) ^ c3 ^ key1) & MASK
        c1, c3 = product1, product0
        key0, key1 = (key0 + WEYL[0]) & MASK, (key1 + WEYL[1]) & MASK
    return c0
