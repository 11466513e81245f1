"""A context: the record that the engine keeps about one running prompt, and the states it passes through.

Tokens are the truth and KV is a cache: `input_token_ids`, `output_token_ids`, the sampling parameters and the seed
determine everything else, so a context can be dropped to them and rebuilt anywhere.

    WAITING ──▶ RUNNING ──▶ FINISHED
       ▲  │      │   │
       │  │      ▼   └────▶ ERROR
       │  │   PREEMPTED ──▶ RUNNING …
       │  └─────────────▶ FINISHED (aborted) or ERROR, from any state that is not an end
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from batonq.engine.block_pool import BlockKey
from batonq.engine.errors import EngineError, IllegalTransition
from batonq.engine.history import TokenHistory
from batonq.engine.logprobs import TokenLogprobs
from batonq.engine.sampling_params import SamplingParams
from batonq.engine.speculation import PromptLookup
from batonq.engine.text import TextState


class ContextState(StrEnum):
    """Where a context is in its life."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    PREEMPTED = "PREEMPTED"
    FINISHED = "FINISHED"
    ERROR = "ERROR"

    @property
    def ended(self) -> bool:
        """Whether no transition leads out of this state."""
        return self in (ContextState.FINISHED, ContextState.ERROR)


class FinishReason(StrEnum):
    """Why a context ended; the values are the wire's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


_ENDS = (ContextState.FINISHED, ContextState.ERROR)
LEGAL_TRANSITIONS: dict[ContextState, tuple[ContextState, ...]] = {
    ContextState.WAITING: (ContextState.RUNNING, *_ENDS),
    ContextState.RUNNING: (ContextState.PREEMPTED, *_ENDS),
    ContextState.PREEMPTED: (ContextState.RUNNING, *_ENDS),
    ContextState.FINISHED: (),
    ContextState.ERROR: (),
}

#: Transitions kept in `Context.debug_info`.
HISTORY_LENGTH = 32


@dataclass(frozen=True, slots=True)
class Transition:
    """One change of state: when (monotonic seconds), from, to, why, and the step that decided it."""

    at: float
    source: ContextState
    target: ContextState
    reason: str
    decision_id: int


@dataclass(slots=True, eq=False)
class Context:
    """One running prompt. Created by `Engine.add`; only the scheduler changes it."""

    context_id: str
    input_token_ids: tuple[int, ...]
    #: `max_tokens` and `seed` are always set here: the effective values.
    sampling_params: SamplingParams
    #: Bytes-level text of the output; a function of `output_token_ids` alone.
    text: TextState

    model_id: str = ""
    request_id: str = ""
    client_id: str | None = None
    parent_id: str | None = None
    priority: int = 0
    is_streaming: bool = False
    #: Milliseconds of Unix time.
    deadline: int | None = None
    #: Position of the first token: 0, or the parent's length for a draft child.
    position_offset: int = 0

    #: Output tokens, apart from the input for ever: penalties, min_tokens and usage count these only.
    output_token_ids: list[int] = field(default_factory=list)
    #: Of each output token, if asked for.
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    #: Of the input's tokens as far as they are computed, if asked for; None for the first, which nothing precedes.
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    #: Tokens that penalties count; None without penalties.
    history: TokenHistory | None = None
    #: Guesses its next tokens; None if none are to be guessed.
    lookup: PromptLookup | None = None
    state: ContextState = ContextState.WAITING
    #: Why it ended. Known early for one that was complete when added and lacks only log probabilities of the prompt.
    finish_reason: FinishReason | None = None
    error: EngineError | None = None
    #: Tokens, from the first, whose keys and values lie in `block_table`.
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    #: Keys of the full blocks at the head of `block_table`.
    block_keys: list[BlockKey] = field(default_factory=list)
    #: Input tokens that were found in the prefix cache at the first schedule; None before it.
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    estimated_memory_bytes: int = 0

    arrival_timestamp: float = field(default_factory=time.monotonic)
    start_timestamp: float | None = None
    debug_info: deque[Transition] = field(default_factory=lambda: deque(maxlen=HISTORY_LENGTH))
    #: `sampling_params.needs_only_largest`, which every step asks for.
    needs_only_largest: bool = field(init=False)

    def __post_init__(self) -> None:
        self.needs_only_largest = self.sampling_params.needs_only_largest

    @property
    def token_count(self) -> int:
        """Input and output tokens known so far."""
        return len(self.input_token_ids) + len(self.output_token_ids)

    @property
    def max_token_limit(self) -> int:
        """Largest `token_count` this context can reach."""
        return len(self.input_token_ids) + self.max_tokens

    @property
    def max_tokens(self) -> int:
        """Effective bound on output tokens."""
        assert self.sampling_params.max_tokens is not None
        return self.sampling_params.max_tokens

    @property
    def seed(self) -> int:
        """Effective seed."""
        assert self.sampling_params.seed is not None
        return self.sampling_params.seed

    @property
    def next_token_id(self) -> int | None:
        """The sampled token whose keys and values are yet to be computed, once only that one is missing."""
        return self.token_at(self.token_count - 1) if self.num_computed_tokens == self.token_count - 1 else None

    @property
    def kv_cache_block_count(self) -> int:
        """Blocks now held."""
        return len(self.block_table)

    def token_at(self, index: int) -> int:
        """Token `index` of input and output together."""
        split = len(self.input_token_ids)
        return self.input_token_ids[index] if index < split else self.output_token_ids[index - split]

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        """Tokens [start, stop) of input and output together."""
        split = len(self.input_token_ids)
        if stop <= split:
            return self.input_token_ids[start:stop]
        if start >= split:
            return self.output_token_ids[start - split : stop - split]
        return (*self.input_token_ids[start:], *self.output_token_ids[: stop - split])

    @property
    def num_needed_tokens(self) -> int:
        """Tokens to compute until something comes of it: all that are known, or what the prompt's log probabilities
        need of one whose output is complete."""
        return self.token_count if self.finish_reason is None else len(self.input_token_ids) - 1

    @property
    def num_missing_prompt_logprobs(self) -> int:
        """Input tokens whose log probabilities are asked for and not computed yet."""
        asked = self.sampling_params.prompt_logprobs is not None
        return len(self.input_token_ids) - len(self.prompt_logprobs) if asked else 0

    def accept(
        self, token_id: int, eos_token_ids: frozenset[int], logprobs: TokenLogprobs | None = None
    ) -> FinishReason | None:
        """Append an output token and say whether, and why, it is the last. A function of the tokens so far alone."""
        params = self.sampling_params
        self.output_token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if self.history is not None:
            self.history.push(token_id)
        if self.lookup is not None:
            self.lookup.push(token_id)
        if token_id in params.stop_token_ids or (token_id in eos_token_ids and not params.ignore_eos):
            if params.include_stop_str_in_output:
                self.text.push(token_id, may_stop=len(self.output_token_ids) >= params.min_tokens)
            return FinishReason.STOP
        if self.text.push(token_id, may_stop=len(self.output_token_ids) >= params.min_tokens):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.output_token_ids) >= self.max_tokens else None

    def transition(self, target: ContextState, reason: str, decision_id: int) -> None:
        """Change the state and record why. Raises IllegalTransition for a change that must not happen."""
        if target not in LEGAL_TRANSITIONS[self.state]:
            raise IllegalTransition(f"context {self.context_id}: {self.state} -> {target} ({reason})")
        now = time.monotonic()
        self.debug_info.append(Transition(now, self.state, target, reason, decision_id))
        if target is ContextState.RUNNING and self.start_timestamp is None:
            self.start_timestamp = now
        self.state = target
