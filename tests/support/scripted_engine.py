"""An engine whose outputs are written down beforehand: for what happens to tokens once they are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from batonq.engine.config import EngineConfig
from batonq.engine.engine import Engine, ModelSpec
from batonq.engine.errors import EngineError
from batonq.engine.logprobs import TokenLogprobs
from batonq.engine.plan import Plan, Samples
from batonq.engine.text import Vocabulary

BLOCK_SIZE = 32


class ScriptedRunner:
    """Computes nothing, and notes the most rows of logits that a step asked for."""

    def __init__(self) -> None:
        self.most_logits = 0

    def forward(self, plan: Plan) -> None:
        wanted = len(plan.draws) + sum(len(row.prompt_logits) for row in plan.prompt_logprobs_rows)
        self.most_logits = max(self.most_logits, wanted)


class ScriptedSampler:
    """Draws what `scripts` say, by context id. The log probability of a prompt's token at `position` is -position."""

    def __init__(self, scripts: Mapping[str, Sequence[int]]) -> None:
        self.scripts = scripts

    def sample(self, plan: Plan, logits: None) -> Samples:
        drawn: list[int | EngineError] = []
        for row, at in plan.draws:
            script = self.scripts[row.context.context_id]
            # Behind a script's end nothing is ever taken.
            drawn.append(script[min(at + 1 - len(row.context.input_token_ids), len(script) - 1)])
        return Samples(
            drawn,
            [None] * len(drawn),
            [
                [TokenLogprobs(row.context.token_at(at + 1), -(at + 1.0), 1, ()) for at in row.prompt_logits]
                for row in plan.prompt_logprobs_rows
            ],
        )


class NoEncoder:
    def encode(self, text: str) -> list[int]:
        raise AssertionError(text)

    encode_word = encode


def build(
    scripts: Mapping[str, Sequence[int]],
    vocabulary: Vocabulary,
    eos_token_ids: frozenset[int],
    num_blocks: int,
    max_model_len: int,
    config: Mapping[str, int],
) -> Engine[None]:
    """An engine over blocks of 32 tokens; `config` are fields of EngineConfig."""
    spec = ModelSpec(
        model_id="scripted",
        max_model_len=max_model_len,
        vocab_size=len(vocabulary.token_bytes),
        eos_token_ids=eos_token_ids,
        block_size=BLOCK_SIZE,
        bytes_per_block=1,
        numerics_id="scripted",
        namespace=b"scripted",
    )
    settings = EngineConfig(kv_cache_memory_bytes=num_blocks, **config)
    return Engine(spec, settings, ScriptedRunner(), ScriptedSampler(scripts), NoEncoder(), vocabulary)
