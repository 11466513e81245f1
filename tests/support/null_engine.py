"""An engine without a model, in plain Python: it draws each next token from a digest of all tokens before it.

Its runner keeps a KV memory that holds token ids, fills it where the plan says, and reads back every token of every row
through the block tables. So a wrong block, a stale one or a row that was skipped is found at once, and so is a second
write to a block that others may read.
"""

from __future__ import annotations

import hashlib
import os
import time
from array import array
from collections.abc import Sequence

from batonq.engine.block_pool import BlockPool
from batonq.engine.config import EngineConfig
from batonq.engine.engine import Engine, ModelSpec
from batonq.engine.errors import EngineError
from batonq.engine.logprobs import TokenLogprobs
from batonq.engine.plan import Plan, Samples
from batonq.engine.sampling_params import SamplingParams
from batonq.engine.text import Vocabulary

VOCAB_SIZE = 256
EOS = 0
BLOCK_SIZE = 4

Digests = list[bytes]


def next_token(tokens: Sequence[int], params: SamplingParams, output_length: int, order: int = 0) -> int:
    """The token that the null model draws after `tokens`; EOS one time in 32, unless it is banned.

    With an `order` only so many tokens before it decide, there are seven, and it soon repeats itself.
    """
    seed = 0 if params.greedy else params.seed
    digest = hashlib.blake2b(array("I", tokens[-order:]).tobytes() + str(seed).encode(), digest_size=8).digest()
    if digest[0] < 8 and output_length >= params.min_tokens:
        return EOS
    return 1 + digest[1] % (7 if order else VOCAB_SIZE - 1)


#: A prompt that begins with this kills the process that computes it.
POISON = b"\xee\xee"


class NullRunner:
    """`step_seconds` is how long a step takes at least, so that tests meet contexts while they run."""

    #: Set once the engine has made it.
    pool: BlockPool

    def __init__(self, num_blocks: int, step_seconds: float) -> None:
        self.memory = [[-1] * BLOCK_SIZE for _ in range(num_blocks)]
        self._step_seconds = step_seconds

    def forward(self, plan: Plan) -> list[list[int]]:
        """For each row of logits that is wanted, all tokens before it as the memory holds them."""
        time.sleep(self._step_seconds)
        self._store(plan)
        read = {id(row): self._read(row.block_table, row.stop) for row in plan.rows}
        for row in plan.rows:
            known = [*row.context.tokens(0, row.stop - len(row.guesses)), *row.guesses]
            assert read[id(row)] == known, f"{row.context.context_id}: wrong KV"
        wanted = [(row, at) for row in plan.prompt_logprobs_rows for at in row.prompt_logits]
        return [read[id(row)][: at + 1] for row, at in (*plan.draws, *wanted)]

    def _store(self, plan: Plan) -> None:
        written = set[tuple[int, int]]()
        for row in plan.rows:
            if bytes(row.context.input_token_ids[: len(POISON)]) == POISON:
                os._exit(66)
            for at in range(max(row.start, row.store_from), row.stop):
                block, slot = row.block_table[at // BLOCK_SIZE], at % BLOCK_SIZE
                assert (block, slot) not in written, f"block {block} is written by two contexts in one step"
                assert block in plan.published or not self.pool.is_published(block), f"block {block} is written again"
                written.add((block, slot))
                self.memory[block][slot] = row.token_ids[at - row.start]

    def _read(self, table: Sequence[int], stop: int) -> list[int]:
        return [self.memory[table[at // BLOCK_SIZE]][at % BLOCK_SIZE] for at in range(stop)]


def logprobs_of(tokens: Sequence[int], token: int, num_top: int) -> TokenLogprobs:
    """What the null model says of `token` after `tokens`: as little as is needed to tell entries apart."""
    digest = hashlib.blake2b(array("I", [*tokens, token]).tobytes(), digest_size=4).digest()
    return TokenLogprobs(token, -digest[0] / 16, 1 + digest[1], tuple((digest[2], -i / 4) for i in range(num_top)))


class NullSampler:
    def __init__(self, order: int = 0) -> None:
        self._order = order

    def sample(self, plan: Plan, logits: list[list[int]]) -> Samples:
        drawn, logprobs = list[int | EngineError](), list[TokenLogprobs | None]()
        for (row, at), tokens in zip(plan.draws, logits, strict=False):
            params = row.context.sampling_params
            token = next_token(tokens, params, at + 1 - len(row.context.input_token_ids), self._order)
            drawn.append(token)
            logprobs.append(None if params.logprobs is None else logprobs_of(tokens, token, params.logprobs))
        rest, prompts = iter(logits[len(drawn) :]), list[list[TokenLogprobs]]()
        for row in plan.prompt_logprobs_rows:
            ids, num_top = row.context.input_token_ids, row.context.sampling_params.prompt_logprobs or 0
            prompts.append([logprobs_of(next(rest), ids[at + 1], num_top) for at in row.prompt_logits])
        return Samples(drawn, logprobs, prompts)


class ByteEncoder:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    encode_word = encode


def build(
    num_blocks: int = 64,
    max_model_len: int = 128,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    step_seconds: float = 0.0,
    numerics_id: str = "null",
    weights_id: str = "",
    order: int = 0,
    num_speculative_tokens: int = 8,
) -> Engine[list[list[int]]]:
    """A null engine: one byte a token, EOS is 0, blocks of 4 tokens; `order` as in `next_token`."""
    spec = ModelSpec(
        model_id="null",
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS}),
        block_size=BLOCK_SIZE,
        bytes_per_block=1,
        numerics_id=numerics_id,
        namespace=b"null",
        weights_id=weights_id,
    )
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_memory_bytes=num_blocks,
        num_speculative_tokens=num_speculative_tokens,
    )
    vocabulary = Vocabulary([bytes([value]) for value in range(VOCAB_SIZE)], frozenset({EOS}))
    runner = NullRunner(num_blocks, step_seconds)
    engine = Engine(spec, config, runner, NullSampler(order), ByteEncoder(), vocabulary)
    runner.pool = engine.pool
    return engine
