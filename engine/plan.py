"""What one step is to do, and what it did: the values that pass between scheduler, runner and sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from batonq.engine.context import Context, FinishReason
from batonq.engine.errors import EngineError
from batonq.engine.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ScheduledContext:
    """One context's part of a step: tokens [start, stop) are computed over the blocks of `block_table`."""

    context: Context
    start: int
    stop: int
    #: First token whose keys and values are stored. Above `start` only for a context whose every token was found in the
    #: cache: its last token is computed for the logits, while the block that holds it is shared and stays as it is.
    store_from: int
    block_table: tuple[int, ...]
    #: Whether the last known token is computed, so that the next one is sampled.
    samples: bool
    #: Tokens at the end of [start, stop) that are guessed (`engine/speculation.py`). The context draws at its last
    #: known token and at each of these.
    guesses: tuple[int, ...] = ()
    #: Positions whose logits give the log probability of the prompt's token after each.
    prompt_logits: range = range(0)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return self.stop - self.start

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens computed in this step."""
        known = self.context.tokens(self.start, self.stop - len(self.guesses))
        return (*known, *self.guesses) if self.guesses else known

    @property
    def draws(self) -> range:
        """Positions whose logits a token is sampled from; the token's own position is one more."""
        return range(self.stop - 1 - len(self.guesses), self.stop) if self.samples else range(0)

    @property
    def drawn(self) -> bool:
        """Whether the next token is sampled from all of the logits."""
        return self.samples and not self.context.needs_only_largest

    @property
    def greedy(self) -> bool:
        """Whether the next token is sampled, and nothing but the largest logit needed for it."""
        return self.samples and self.context.needs_only_largest


@dataclass(frozen=True)
class Plan:
    """One step: rows in scheduling order. `decision_id` numbers steps from 1."""

    decision_id: int
    rows: tuple[ScheduledContext, ...]
    #: Blocks whose contents this step computes and that are published already, for others in the same step.
    published: tuple[int, ...]
    #: Contexts that lost their blocks while this plan was made.
    preempted: tuple[Context, ...]
    #: Contexts that began to run, or began again.
    started: tuple[Context, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(row.num_tokens for row in self.rows)

    # Sampler and scheduler both ask for these parts of the rows, so they are looked for once.

    @cached_property
    def drawn_rows(self) -> tuple[ScheduledContext, ...]:
        """Rows that are `drawn`, in order."""
        return tuple(row for row in self.rows if row.drawn)

    @cached_property
    def greedy_rows(self) -> tuple[ScheduledContext, ...]:
        """Rows that are `greedy`, in order."""
        return tuple(row for row in self.rows if row.greedy)

    @cached_property
    def sampling_rows(self) -> tuple[ScheduledContext, ...]:
        """The rows whose next tokens are sampled: `drawn_rows`, then `greedy_rows`."""
        return self.drawn_rows + self.greedy_rows

    @cached_property
    def draws(self) -> tuple[tuple[ScheduledContext, int], ...]:
        """Each row of `sampling_rows` with each of its `draws`; samples are in this order."""
        return tuple((row, at) for row in self.sampling_rows for at in row.draws)

    @cached_property
    def prompt_logprobs_rows(self) -> tuple[ScheduledContext, ...]:
        """The rows with `prompt_logits`, in order; their logits lie between those of `drawn_rows` and `greedy_rows`."""
        return tuple(row for row in self.rows if row.prompt_logits)


@dataclass(frozen=True, slots=True)
class Samples:
    """What the sampler made of a plan's logits. A row that can't be used has an error, and hurts no other."""

    #: For each of `Plan.draws`.
    tokens: Sequence[int | EngineError] = ()
    #: For each of `Plan.draws`; None where they are not asked for.
    logprobs: Sequence[TokenLogprobs | None] = ()
    #: For each of `Plan.prompt_logprobs_rows`, in the order of its `prompt_logits`.
    prompt_logprobs: Sequence[Sequence[TokenLogprobs] | EngineError] = ()


@dataclass(frozen=True, slots=True)
class ContextOutput:
    """What a step did to one context."""

    context_id: str
    #: Tokens sampled in this step and accepted.
    new_token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: EngineError | None = None
    #: Of each new token, if the context asks for them.
    new_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step did: outputs of the contexts that sampled or ended, and ids of those that changed place."""

    decision_id: int
    outputs: tuple[ContextOutput, ...] = ()
    started: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    num_tokens: int = 0
