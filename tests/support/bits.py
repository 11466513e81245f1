"""The bits of logits: of sequences alone, of the same in random company, and of each prefix in an engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from batonq.engine.engine import Runner
from batonq.engine.plan import Plan, ScheduledContext
from batonq.kernels.cpu_backend import CpuBackend
from batonq.kernels.logits import Logits
from tests.support.batches import Piece, blocks_of, make_batch

#: Around the kernels' tiles of 6 rows, blocks of 32 tokens, and chunks of 126 rows and of 256 keys.
CHUNKS = (1, 2, 5, 6, 7, 31, 32, 33, 63, 64, 65, 125, 126, 127, 255, 256, 257)


def bits(logits: npt.NDArray[np.float32]) -> list[bytes]:
    """A digest of each row, which is small where a row of the real model is not."""
    return [blake2b(row, digest_size=16).digest() for row in logits]


def dirty(backend: CpuBackend) -> None:
    """What a reused block may hold in slots that nobody has written yet: NaN in every dtype."""
    for memory in backend.cache_bytes():
        memory[:] = 0xFF


def alone(backend: CpuBackend, tokens: Sequence[int]) -> list[bytes]:
    """The bits at each position of a sequence that is computed at once."""
    return bits(backend.forward(make_batch([Piece(tokens, 0, len(tokens), range(blocks_of(len(tokens))))])).values)


def together(
    backend: CpuBackend,
    sequences: Sequence[Sequence[int]],
    chance: random.Random,
    num_blocks: int,
    most_tokens: int = 1 << 20,
) -> list[list[bytes]]:
    """The same of sequences that come and go together, in random chunks of up to `most_tokens` a step.

    Some are decoded from their first token, some prefilled in big chunks, most now this way and now that.
    """
    dirty(backend)
    free = chance.sample(range(num_blocks), num_blocks)
    blocks = [[free.pop() for _ in range(blocks_of(len(tokens)))] for tokens in sequences]
    decodes = [chance.choice((0.0, 0.5, 0.9, 1.0)) for _ in sequences]
    made: list[list[bytes]] = [[] for _ in sequences]
    while running := [i for i, tokens in enumerate(sequences) if len(made[i]) < len(tokens)]:
        chosen = chance.sample(running, chance.choice((len(running), chance.randint(1, len(running)))))
        pieces: list[Piece] = []
        left = most_tokens
        for i in chosen:
            if left == 0:
                break
            start = len(made[i])
            chunk = 1 if chance.random() < decodes[i] else chance.choice(CHUNKS)
            count = min(chunk, len(sequences[i]) - start, left)
            pieces.append(Piece(sequences[i], start, start + count, blocks[i]))
            left -= count
        got = bits(backend.forward(make_batch(pieces)).values)
        for i, piece in zip(chosen, pieces, strict=False):
            made[i] += got[: piece.end - piece.start]
            del got[: piece.end - piece.start]
    return made


def differences(got: Sequence[Sequence[bytes]], expected: Sequence[Sequence[bytes]]) -> list[tuple[int, int]]:
    """(sequence, position) of all bits that differ."""
    return [
        (i, position)
        for i, (ours, theirs) in enumerate(zip(got, expected, strict=True))
        for position, (one, other) in enumerate(zip(ours, theirs, strict=True))
        if one != other
    ]


class SameBits:
    """A runner that knows the bits of the logits after each prefix, and fails if they ever come out otherwise.

    `seen`, by the prefix's tokens, may outlive it: other engines are then held to the same bits. Threads, neighbours,
    chunks, caches and preemptions are no part of a prefix.
    """

    def __init__(self, runner: Runner[Logits], seen: dict[tuple[str | int, ...], bytes]) -> None:
        self._runner = runner
        self._seen = seen
        #: Rows whose bits were known already.
        self.compared = 0

    def forward(self, plan: Plan) -> Logits:
        """Computes, compares and remembers."""
        logits = self._runner.forward(plan)
        whole = [(row, at) for row in plan.drawn_rows for at in row.draws]
        whole += [(row, at) for row in plan.prompt_logprobs_rows for at in row.prompt_logits]
        greedy = [(row, at) for row in plan.greedy_rows for at in row.draws]
        largest = [i.tobytes() + x.tobytes() for i, x in zip(logits.largest_ids, logits.largest, strict=True)]
        self._compare("whole", whole, bits(logits.values))
        self._compare("largest", greedy, largest)
        return logits

    def _compare(self, kind: str, at: Sequence[tuple[ScheduledContext, int]], bits_there: Sequence[bytes]) -> None:
        for (row, position), found in zip(at, bits_there, strict=True):
            tokens = (*row.context.tokens(0, row.start), *row.token_ids)[: position + 1]
            self.compared += (kind, *tokens) in self._seen
            assert self._seen.setdefault((kind, *tokens), found) == found, (row.context.context_id, position, kind)
