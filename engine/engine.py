"""The engine: contexts go in, tokens come out, and `step` is the only loop.

    plan    = scheduler.schedule()             which contexts, how many tokens of each, into which blocks
    logits  = runner.forward(plan)             one ragged batch
    sampled = sampler.sample(plan, logits)
    return    scheduler.commit(plan, sampled)  new tokens, finished contexts

Knows no torch: what computes and what samples are given to it (`engine/loading.py` puts one together for a model).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Generic, Protocol, TypeVar

from batonq.engine.block_pool import BlockPool
from batonq.engine.config import EngineConfig
from batonq.engine.context import Context, ContextState, FinishReason
from batonq.engine.errors import DuplicateContext, EngineBusy, EngineError, InvalidOutputs
from batonq.engine.history import TokenHistory
from batonq.engine.limits import Limits, effective_request
from batonq.engine.logprobs import TokenLogprobs
from batonq.engine.plan import ContextOutput, Plan, Samples, StepOutput
from batonq.engine.sampling_params import SamplingParams
from batonq.engine.scheduler import Scheduler
from batonq.engine.speculation import PromptLookup
from batonq.engine.text import TextState, Vocabulary

Logits = TypeVar("Logits")
LogitsOut_co = TypeVar("LogitsOut_co", covariant=True)
LogitsIn_contra = TypeVar("LogitsIn_contra", contravariant=True)


class Runner(Protocol[LogitsOut_co]):
    """Computes a plan."""

    def forward(self, plan: Plan) -> LogitsOut_co:
        """What `plan` asks for: logits for the draws of its `drawn_rows`, of every `prompt_logits` of its
        `prompt_logprobs_rows`, and the largest ones for the draws of its `greedy_rows`."""


class Sampler(Protocol[LogitsIn_contra]):
    """Draws the next token of each sampling row, and says how likely tokens were."""

    def sample(self, plan: Plan, logits: LogitsIn_contra) -> Samples:
        """What the logits give, or what is wrong with a row alone."""


class Encoder(Protocol):
    """Text to token ids."""

    def encode(self, text: str) -> list[int]:
        """Token ids, with BOS exactly once if the model wants it."""

    def encode_word(self, text: str) -> list[int]:
        """Token ids of the text alone."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the engine knows about a model, beside how to compute it."""

    model_id: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    block_size: int
    #: Keys and values of one block in all layers, in bytes.
    bytes_per_block: int
    #: Names the arithmetic; results are bitwise equal only between equal ids.
    numerics_id: str
    #: Digest of all that makes KV differ; the root of block names.
    namespace: bytes
    #: Names the weights by their content; empty if nobody knows it.
    weights_id: str = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """The finished output of one context. `token_ids` includes the EOS or stop token that ended it; `text` doesn't,
    unless the request asks for it."""

    context_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    num_cached_tokens: int
    error: EngineError | None
    #: Of each of `token_ids`, and of each input token (None for the first); empty if not asked for.
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs | None]


class Engine(Generic[Logits]):
    """Runs contexts over one model. Single-threaded: no method may be called while another runs."""

    def __init__(
        self,
        spec: ModelSpec,
        config: EngineConfig,
        runner: Runner[Logits],
        sampler: Sampler[Logits],
        encoder: Encoder,
        vocabulary: Vocabulary,
    ) -> None:
        self.spec = spec
        self.config = config
        self.pool = BlockPool(config.kv_cache_memory_bytes // spec.bytes_per_block, spec.block_size, spec.namespace)
        if self.pool.num_blocks == 0:
            raise EngineError(
                "invalid_configuration",
                f"kv_cache_memory of {config.kv_cache_memory_bytes} bytes holds no block of {spec.bytes_per_block}",
                "kv_cache_memory_bytes",
            )
        max_model_len = min(config.max_model_len or spec.max_model_len, spec.max_model_len)
        self.limits = Limits(max_model_len, self.pool.num_blocks * spec.block_size, spec.vocab_size)
        self.runner = runner
        self.sampler = sampler
        self.scheduler = Scheduler(config, self.pool, spec.eos_token_ids)
        self.encoder = encoder
        self.vocabulary = vocabulary
        self.contexts: dict[str, Context] = {}
        self._ended_at_add: list[ContextOutput] = []
        #: Called with each plan before it is computed.
        self.on_plan: Callable[[Plan], None] | None = None

    def add(
        self,
        context_id: str,
        input_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        output_token_ids: Sequence[int] = (),
        output_logprobs: Sequence[TokenLogprobs] = (),
        priority: int = 0,
        is_streaming: bool = False,
    ) -> Context:
        """Take in a new context, or one that was begun elsewhere and has `output_token_ids` already.

        `output_logprobs` are those of the output tokens, if the parameters ask for them. Raises ContextLengthExceeded,
        InvalidTokenIds, InvalidOutputs, DuplicateContext or an EngineError that names the parameter; nothing is changed
        then. A resumed context whose tokens are complete ends at the next step without being computed, unless log
        probabilities of its prompt are asked for.
        """
        if context_id in self.contexts:
            raise DuplicateContext(context_id)
        input_token_ids, params = effective_request(self.limits, self.encoder, input_token_ids, sampling_params)
        if len(output_logprobs) != (0 if params.logprobs is None else len(output_token_ids)):
            raise InvalidOutputs(
                context_id, f"{len(output_logprobs)} log probabilities, {len(output_token_ids)} tokens"
            )
        context = self._new_context(context_id, input_token_ids, params)
        context.priority, context.is_streaming = priority, is_streaming
        reason = None
        for token, logprobs in zip_longest(output_token_ids, output_logprobs):
            if reason is not None:
                raise InvalidOutputs(context_id, "tokens follow its end")
            reason = context.accept(token, self.spec.eos_token_ids, logprobs)
        if self.config.num_speculative_tokens and not params.depends_on_output and params.logprobs is None:
            context.lookup = PromptLookup((*input_token_ids, *output_token_ids))
        self.contexts[context_id] = context
        context.finish_reason = reason
        if reason is None or context.num_missing_prompt_logprobs:
            self.scheduler.add(context)
        else:
            context.transition(ContextState.FINISHED, "complete when added", 0)
            self._ended_at_add.append(ContextOutput(context_id, (), reason))
        return context

    def _new_context(self, context_id: str, input_token_ids: tuple[int, ...], params: SamplingParams) -> Context:
        text = TextState(
            self.vocabulary,
            params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
            echo=input_token_ids if params.echo else (),
        )
        context = Context(context_id, input_token_ids, params, text, model_id=self.spec.model_id)
        if params.repetition_penalty != 1.0:
            context.history = TokenHistory(input_token_ids)
        elif params.presence_penalty or params.frequency_penalty:
            context.history = TokenHistory()
        if params.prompt_logprobs is not None:
            context.prompt_logprobs.append(None)
        context.estimated_memory_bytes = self._estimate_memory(context)
        return context

    def _estimate_memory(self, context: Context) -> int:
        peak_tokens = len(context.input_token_ids) + self.scheduler.forecast.remaining(context)
        return self.pool.blocks_for(peak_tokens) * self.spec.bytes_per_block + self.spec.vocab_size * 4

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._ended_at_add)

    def step(self) -> StepOutput:
        """Advance every running context; see the module's first lines. Without work it returns an empty output.

        If computing fails, every context of the step goes back to its tokens and the exception is raised again.
        """
        plan = self.scheduler.schedule()
        if plan.rows:
            if self.on_plan is not None:
                self.on_plan(plan)
            try:
                sampled = self.sampler.sample(plan, self.runner.forward(plan))
            except BaseException:
                self.scheduler.rollback(plan)
                raise
        else:
            sampled = Samples()
        output = self.scheduler.commit(plan, sampled)
        return self._with_ended_at_add(output)

    def _with_ended_at_add(self, output: StepOutput) -> StepOutput:
        ended, self._ended_at_add = self._ended_at_add, []
        return StepOutput(
            output.decision_id, (*ended, *output.outputs), output.started, output.preempted, output.num_tokens
        )

    def abort(self, context_id: str) -> None:
        """End a context now and free its blocks. One that is unknown or has ended is left as it is."""
        context = self.contexts.get(context_id)
        if context is not None and not context.state.ended:
            self.scheduler.abort(context)

    def preempt(self, context_id: str) -> None:
        """Take a running context's blocks now, so that it is computed again. Any other is left as it is."""
        context = self.contexts.get(context_id)
        if context is not None and context.state is ContextState.RUNNING:
            self.scheduler.preempt(context)

    def forget(self, context_id: str) -> Generation:
        """Hand out an ended context's output and drop its record."""
        context = self.contexts.pop(context_id)
        assert context.state.ended, context_id
        assert context.finish_reason is not None
        self._ended_at_add = [output for output in self._ended_at_add if output.context_id != context_id]
        return Generation(
            context_id,
            context.output_token_ids,
            context.text.value,
            context.finish_reason,
            context.num_cached_tokens or 0,
            context.error,
            context.logprobs,
            context.prompt_logprobs,
        )

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling_params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Generation]:
        """Run prompts (text or token ids) to their ends; outputs in the order of the prompts.

        Needs the engine to itself. Raises what `add` raises, before any work is done.
        """
        assert not self.contexts, "generate needs the engine to itself"
        each = [sampling_params] * len(prompts) if isinstance(sampling_params, SamplingParams) else sampling_params
        ids = [str(index) for index in range(len(prompts))]
        try:
            for context_id, prompt, params in zip(ids, prompts, each, strict=True):
                tokens = self.encoder.encode(prompt) if isinstance(prompt, str) else prompt
                self.add(context_id, tokens, params)
            while self.has_work:
                self.step()
            return [self.forget(context_id) for context_id in ids]
        finally:
            for context_id in tuple(self.contexts):
                self.abort(context_id)
                self.forget(context_id)

    def reset_prefix_cache(self) -> None:
        """Forget the KV blocks of earlier contexts, so that the next ones are computed from their first token.

        Raises EngineBusy if there are contexts that haven't been forgotten; nothing is changed then.
        """
        if self.contexts:
            raise EngineBusy("reset_prefix_cache", len(self.contexts))
        self.pool.reset_prefix_cache()

    def check_idle(self) -> None:
        """Validate that nothing is left of contexts that ended. Raises AssertionError naming what leaked."""
        self.scheduler.check()
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert self.pool.num_held == 0, f"{self.pool.num_held} blocks leaked"
