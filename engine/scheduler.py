"""Which contexts run in a step, how many tokens of each, and in which blocks.

There is no prefill or decode phase: every context has tokens it knows and tokens it has computed, and a step lets the
second catch up with the first, under a token budget; a decode is a catch-up of one. Contexts are served in order of
arrival. Admission looks ahead to the peak of blocks; when that forecast was too low, the youngest are preempted: they
lose their blocks, keep their tokens, and are computed again.

A context that decodes may get guessed tokens on top (`engine/speculation.py`), where there is room for them.

Log probabilities of a prompt need the logits of every position: a context that asks for them takes no blocks from the
cache until they are complete, and few of them are computed in a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest

from batonq.engine.block_pool import BlockKey, BlockPool
from batonq.engine.config import EngineConfig
from batonq.engine.context import Context, ContextState, FinishReason
from batonq.engine.errors import EngineError
from batonq.engine.forecast import OutputForecast
from batonq.engine.logprobs import TokenLogprobs
from batonq.engine.plan import ContextOutput, Plan, Samples, ScheduledContext, StepOutput
from batonq.engine.speculation import choose_guesses

#: A context preempted this often is admitted only where everybody's `max_tokens` fits, so it is not preempted again.
MAX_OPTIMISTIC_PREEMPTIONS = 3

#: Rows of logits computed for prompts' log probabilities in a step, which bounds the memory they take.
MAX_PROMPT_LOGITS = 64


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    budget: int
    prompt_logits: int = MAX_PROMPT_LOGITS
    rows: list[ScheduledContext] = field(default_factory=list)
    published: list[int] = field(default_factory=list)
    preempted: list[Context] = field(default_factory=list)
    started: list[Context] = field(default_factory=list)


class Scheduler:
    """Owns the two queues of contexts and their block tables. Never touches model memory. Not thread-safe."""

    def __init__(self, config: EngineConfig, pool: BlockPool, eos_token_ids: frozenset[int]) -> None:
        self.config = config
        self.pool = pool
        self.waiting: deque[Context] = deque()
        #: In order of arrival; so the last is the youngest.
        self.running: list[Context] = []
        self.forecast = OutputForecast()
        #: While there are any, steps hold these contexts alone; the others keep what they have.
        self.alone: set[str] = set()
        self._eos_token_ids = eos_token_ids
        self._decision_id = 0

    def add(self, context: Context) -> None:
        """Put a new context behind those that wait and are as urgent or more. It must fit the pool alone."""
        assert self._blocks_at_most(context) <= self.pool.num_blocks
        later = (i for i, other in enumerate(self.waiting) if other.priority > context.priority)
        self.waiting.insert(next(later, len(self.waiting)), context)

    # ── planning ────────────────────────────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> Plan:
        """Plan the next step: first those that run, then, if nobody lost blocks for it, those that wait."""
        self._decision_id += 1
        draft = _Draft(self.config.max_num_batched_tokens)
        for context in tuple(self.running):
            # A context may have been preempted for an older one earlier in this loop.
            if draft.budget and context.state is ContextState.RUNNING and self._may_run(context):
                self._schedule(context, draft)
        if self.alone:
            self._admit_alone(draft)
        else:
            self._add_guesses(draft)
            self._admit(draft)
        return Plan(
            self._decision_id,
            tuple(draft.rows),
            tuple(draft.published),
            tuple(draft.preempted),
            tuple(draft.started),
        )

    def _may_run(self, context: Context) -> bool:
        return not self.alone or context.context_id in self.alone

    def _admit_alone(self, draft: _Draft) -> None:
        """Admit those that run alone, taking blocks and places from the others, the youngest first."""
        for context in [context for context in self.waiting if context.context_id in self.alone]:
            others = [running for running in self.running if running.context_id not in self.alone]
            full = self.config.max_num_seqs
            while others and (len(self.running) >= full or not self._fits(context, self._shared_with(context))):
                victim = others.pop()
                self._preempt(victim, "makes room for one that runs alone")
                draft.preempted.append(victim)
            if not draft.budget or len(self.running) >= full or not self._fits(context, self._shared_with(context)):
                return
            self.waiting.remove(context)
            self._start(context, draft)

    def _shared_with(self, context: Context) -> list[int]:
        return [block for block, _ in self._cached_blocks(context)]

    def _start(self, context: Context, draft: _Draft) -> None:
        self.running.append(context)
        context.transition(ContextState.RUNNING, "admitted", self._decision_id)
        draft.started.append(context)
        self._schedule(context, draft)

    def _admit(self, draft: _Draft) -> None:
        if not self._may_admit(draft):
            return
        at_most = sum(self._blocks_at_most(context) for context in self.running)
        while self._may_admit(draft):
            context = self.waiting[0]
            at_most += self._blocks_at_most(context)
            # Where all have room at their longest, nothing has to be forecast.
            if at_most > self.pool.num_blocks and not self._fits(context, self._shared_with(context)):
                return
            self.waiting.popleft()
            self._start(context, draft)

    def _may_admit(self, draft: _Draft) -> bool:
        room = draft.budget > 0 and len(self.running) < self.config.max_num_seqs
        return room and bool(self.waiting) and not draft.preempted

    def _schedule(self, context: Context, draft: _Draft) -> None:
        """Add the context's next tokens to the draft, with blocks for them."""
        self._take_cached(context)
        store_from = context.num_computed_tokens
        # Where all tokens are cached, the last one is computed again for its logits, and not stored.
        start = min(store_from, context.num_needed_tokens - 1)
        stop = min(context.num_needed_tokens, start + draft.budget)
        prompt_logits = range(0)
        if context.num_missing_prompt_logprobs:
            first = max(start, len(context.prompt_logprobs) - 1)
            stop = min(stop, first + draft.prompt_logits)
            prompt_logits = range(first, min(stop, len(context.input_token_ids) - 1))
            if stop == start:
                return
        missing = self.pool.blocks_for(stop) - len(context.block_table)
        while missing > self.pool.num_available:
            victim = self.running[-1]
            self._preempt(victim, "out of blocks")
            draft.preempted.append(victim)
            if victim is context:
                return
        context.block_table += self.pool.allocate(missing)
        draft.published += self._publish(context, stop)
        samples = stop == context.token_count
        table = tuple(context.block_table)
        row = ScheduledContext(context, start, stop, store_from, table, samples, prompt_logits=prompt_logits)
        draft.rows.append(row)
        draft.budget -= stop - start
        draft.prompt_logits -= len(prompt_logits)

    def _add_guesses(self, draft: _Draft) -> None:
        """Let rows that decode compute guessed tokens too, with what budget and blocks the known tokens leave."""
        most = self.config.num_speculative_tokens
        if not most or draft.preempted:
            return
        at = {row.context.context_id: i for i, row in enumerate(draft.rows) if row.samples and row.num_tokens == 1}
        # Each may need a row of logits, and these take memory.
        budget = min(draft.budget, max(most, self.config.max_num_seqs))
        for name, guesses in choose_guesses([draft.rows[i].context for i in at.values()], most, budget).items():
            row = draft.rows[at[name]]
            stop, context = row.stop + len(guesses), row.context
            missing = self.pool.blocks_for(stop) - len(context.block_table)
            if missing > self.pool.num_available:
                continue
            context.block_table += self.pool.allocate(missing)
            table = tuple(context.block_table)
            draft.rows[at[name]] = replace(row, stop=stop, block_table=table, guesses=guesses)
            draft.budget -= len(guesses)

    def preempt(self, context: Context) -> None:
        """Take a running context's blocks from it between two steps. It is the first to be admitted again."""
        assert context.state is ContextState.RUNNING, context.context_id
        self._preempt(context, "asked for")

    def _preempt(self, context: Context, reason: str) -> None:
        context.num_preemptions += 1
        self._send_back(context, reason)

    def _send_back(self, context: Context, reason: str) -> None:
        """Take a running context's blocks, and line it up in front."""
        self.running.remove(context)
        self._drop_blocks(context)
        context.transition(ContextState.PREEMPTED, reason, self._decision_id)
        self.waiting.appendleft(context)

    # ── blocks ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _cached_blocks(self, context: Context) -> Iterator[tuple[int, BlockKey]]:
        """Published blocks that hold the context's next tokens, to the very last one if all are there."""
        size = self.pool.block_size
        position = context.num_computed_tokens
        if context.num_missing_prompt_logprobs:
            return
        if position != len(context.block_table) * size:
            return  # in the middle of a block of its own
        parent = context.block_keys[-1] if context.block_keys else None
        while position + size <= context.token_count:
            found = self.pool.lookup(parent, context.tokens(position, position + size))
            if found is None:
                return
            yield found
            parent = found[1]
            position += size

    def _take_cached(self, context: Context) -> None:
        """Share every published block that comes next, whoever computed it and be it earlier in this very step."""
        for block, key in self._cached_blocks(context):
            self.pool.share((block,))
            context.block_table.append(block)
            context.block_keys.append(key)
            context.num_computed_tokens += self.pool.block_size
        if context.num_cached_tokens is None:
            context.num_cached_tokens = min(context.num_computed_tokens, len(context.input_token_ids))

    def _publish(self, context: Context, stop: int) -> list[int]:
        """Name the blocks that `stop` known tokens fill, so that contexts scheduled after this one share them."""
        blocks: list[int] = []
        size = self.pool.block_size
        for index in range(len(context.block_keys), stop // size):
            parent = context.block_keys[-1] if context.block_keys else None
            block = context.block_table[index]
            tokens = context.tokens(index * size, (index + 1) * size)
            context.block_keys.append(self.pool.publish(block, parent, tokens))
            blocks.append(block)
        return blocks

    def _drop_blocks(self, context: Context) -> None:
        self.pool.release(context.block_table)
        context.block_table = []
        context.block_keys = []
        context.num_computed_tokens = 0

    # ── admission ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _blocks_at_most(self, context: Context) -> int:
        return self.pool.blocks_for(context.max_token_limit)

    def _fits(self, candidate: Context, cached: Sequence[int]) -> bool:
        """Whether the peak of blocks stays within the pool if the candidate runs too."""
        cautious = candidate.num_preemptions >= MAX_OPTIMISTIC_PREEMPTIONS
        remaining = _remaining_at_most if cautious else self.forecast.remaining
        return self._peak_blocks(candidate, cached, remaining) <= self.pool.num_blocks

    def _peak_blocks(self, candidate: Context, cached: Sequence[int], remaining: Callable[[Context], int]) -> int:
        """Largest number of blocks held at once, if every context ends after its `remaining` tokens.

        With contexts in order of falling `remaining`, the first i are alive when the i-th ends, and each of them has
        grown by what the i-th had left. A shared block counts once.
        """
        parts = [(remaining(context), context, context.block_table) for context in self.running]
        parts.append((remaining(candidate), candidate, list(cached)))
        parts.sort(key=lambda part: part[0], reverse=True)
        peak = shared = total = 0
        seen: set[int] = set()
        alive: list[int] = []
        for left, context, table in parts:
            shared += sum(block in seen for block in table)
            seen.update(table)
            alive.append(context.token_count)
            total += context.token_count
            # The bound is cheap and settles most cases; the exact sum is quadratic.
            bound = (total + len(alive) * left) // self.pool.block_size + len(alive) - shared
            if bound > self.pool.num_blocks:
                bound = sum(self.pool.blocks_for(tokens + left) for tokens in alive) - shared
            peak = max(peak, bound)
        return peak

    # ── results ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def commit(self, plan: Plan, samples: Samples) -> StepOutput:
        """Take in what a step's logits gave, and end the contexts that are complete."""
        for row in plan.rows:
            row.context.num_computed_tokens = row.stop - len(row.guesses)
        outputs: list[ContextOutput] = []
        for row, entries in zip(plan.prompt_logprobs_rows, samples.prompt_logprobs, strict=True):
            outputs += self._accept_prompt_logprobs(row.context, entries)
        drawn = zip(samples.tokens, samples.logprobs, strict=True)
        for row in plan.sampling_rows:
            of_row = list(islice(drawn, len(row.draws)))
            if not row.context.state.ended:
                outputs.append(self._accept(row, of_row))
        return StepOutput(
            plan.decision_id,
            tuple(outputs),
            tuple(context.context_id for context in plan.started),
            tuple(context.context_id for context in plan.preempted),
            plan.num_tokens,
        )

    def _accept_prompt_logprobs(
        self, context: Context, entries: Sequence[TokenLogprobs] | EngineError
    ) -> Iterator[ContextOutput]:
        """Take in a part of them; an output if the context has ended with it."""
        if isinstance(entries, EngineError):
            yield self._fail(context, entries)
            return
        context.prompt_logprobs += entries
        reason = context.finish_reason
        if reason is not None and not context.num_missing_prompt_logprobs:
            self._end(context, ContextState.FINISHED, reason)
            yield ContextOutput(context.context_id, (), reason)

    def _accept(
        self, row: ScheduledContext, drawn: Sequence[tuple[int | EngineError, TokenLogprobs | None]]
    ) -> ContextOutput:
        """Take in what was drawn, up to the first token that the row hadn't guessed."""
        context = row.context
        tokens, entries, reason = list[int](), list[TokenLogprobs](), None
        for (token, logprobs), guess in zip_longest(drawn, row.guesses):
            if isinstance(token, EngineError):
                if not tokens:
                    return self._fail(context, token)
                break  # the next step meets it again
            reason = context.accept(token, self._eos_token_ids, logprobs)
            tokens.append(token)
            if logprobs is not None:
                entries.append(logprobs)
            if reason is not None or token != guess:
                break
            context.num_computed_tokens += 1
        if row.guesses:
            self._settle(context)
        if reason is not None:
            self.forecast.observe(len(context.output_token_ids))
            self._end(context, ContextState.FINISHED, reason)
        return ContextOutput(context.context_id, tuple(tokens), reason, new_logprobs=tuple(entries))

    def _settle(self, context: Context) -> None:
        """Name the blocks that right guesses have filled, and give back those that wrong ones had begun."""
        self._publish(context, context.num_computed_tokens)
        held = self.pool.blocks_for(context.num_computed_tokens)
        self.pool.release(context.block_table[held:])
        del context.block_table[held:]

    def _fail(self, context: Context, error: EngineError) -> ContextOutput:
        context.error = error
        self._end(context, ContextState.ERROR, FinishReason.ERROR)
        return ContextOutput(context.context_id, (), FinishReason.ERROR, error)

    def abort(self, context: Context) -> None:
        """End a context that has not ended, wherever it is."""
        if context.state is not ContextState.RUNNING:
            self.waiting.remove(context)
        self._end(context, ContextState.FINISHED, FinishReason.ABORT)

    def _end(self, context: Context, state: ContextState, reason: FinishReason) -> None:
        if context.state is ContextState.RUNNING:
            self.running.remove(context)
        self._drop_blocks(context)
        context.finish_reason = reason
        context.transition(state, reason, self._decision_id)

    def rollback(self, plan: Plan) -> None:
        """Undo a plan whose step failed: its blocks hold nothing, so its contexts go back to their tokens."""
        for block in plan.published:
            self.pool.withdraw(block)
        for row in reversed(plan.rows):
            self._send_back(row.context, "step failed")

    # ── invariants ──────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Validate queues, page tables and the pool. Raises AssertionError that names what is wrong."""
        contexts = [*self.running, *self.waiting]
        self.pool.check([context.block_table for context in contexts])
        assert len({context.context_id for context in contexts}) == len(contexts)
        for context in self.running:
            assert context.state is ContextState.RUNNING, context.context_id
            assert len(context.block_table) == self.pool.blocks_for(context.num_computed_tokens), context.context_id
            self._check_keys(context)
        for context in self.waiting:
            assert context.state in (ContextState.WAITING, ContextState.PREEMPTED), context.context_id
            assert not context.block_table, context.context_id
            assert context.num_computed_tokens == 0, context.context_id

    def _check_keys(self, context: Context) -> None:
        size = self.pool.block_size
        assert len(context.block_keys) == context.num_computed_tokens // size, context.context_id
        parent, name = None, self.pool.root
        for index, key in enumerate(context.block_keys):
            tokens = context.tokens(index * size, (index + 1) * size)
            name = self.pool.name_of(name, tokens)
            assert key.parent is parent, f"{context.context_id}: block {index} is of another chain"
            assert (key.name, key.tokens) == (name, tuple(tokens)), f"{context.context_id}: block {index} isn't its own"
            parent = key


def _remaining_at_most(context: Context) -> int:
    return max(1, context.max_tokens - len(context.output_token_ids))
