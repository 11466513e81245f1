"""What a request may ask of the sampler, and when its output ends.

Shared by the wire schema (`producer/schema.py`) and the engine, so it imports nothing but pydantic. Names and defaults
are vLLM's and OpenAI's; semantics that differ between those are spelt out at the field.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MAX_SEED = 2**64 - 1

#: Most alternatives that `logprobs` and `prompt_logprobs` may ask for, as in OpenAI's API.
MAX_LOGPROBS = 20

#: Parameters that users of OpenAI's or vLLM's API know and that this version does not carry out. They are refused by
#: name: ignoring one would return other text than was asked for.
UNSUPPORTED_PARAMETERS = frozenset(
    {
        "audio",
        "best_of",
        "function_call",
        "functions",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "length_penalty",
        "modalities",
        "parallel_tool_calls",
        "prediction",
        "reasoning_effort",
        "response_format",
        "structured_outputs",
        "suffix",
        "tool_choice",
        "tools",
        "use_beam_search",
        "web_search_options",
    }
)

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class SamplingParams(BaseModel):
    """How the tokens of one context are drawn and when they end. Frozen; `None` for a field means its default.

    The logits are adjusted first, in this order: `allowed_token_ids`, `bad_words`, `logit_bias`, the bans of
    `min_tokens`, penalties. Then the filters apply: temperature, `top_k`, `top_p` over what `top_k` left, `min_p`
    against the most likely token. With temperature 0 the largest adjusted logit is taken and no filter matters.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: Annotated[float, Field(ge=0.0, le=1e6, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    #: Keep the `top_k` most likely tokens; 0 or -1 keeps all.
    top_k: Annotated[int, Field(ge=-1)] = 0
    #: Keep tokens at least `min_p` times as likely as the most likely one; 0 keeps all.
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    #: Bound on output tokens. `None`: whatever room the model and the cache leave. Above the room it is clamped.
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    #: EOS and stop tokens cannot be drawn before this many output tokens.
    min_tokens: Annotated[int, Field(ge=0)] = 0
    #: The text ends before the first occurrence of any of these in the output, wherever token borders fall.
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False
    #: 64 bits; chosen when the job is first claimed if not given.
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    #: Positive logits of tokens in prompt or output are divided by it, others multiplied (as in transformers).
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    #: Taken off the logits of tokens in the output: once each, and once per occurrence.
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    #: Added to the logits of these tokens.
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(default_factory=dict)
    #: Words that the output must not contain, spelt with or without a space before them. In the parameters that are
    #: carried out they have become `bad_words_token_ids`.
    bad_words: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    #: The last token of each sequence cannot be drawn where the output ends with the others.
    bad_words_token_ids: tuple[Annotated[tuple[TokenId, ...], Field(min_length=1)], ...] = ()
    #: Nothing else can be drawn, EOS included.
    allowed_token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)] | None = None
    #: Give log probabilities (`engine/logprobs.py`) of output tokens, with this many alternatives; None gives none.
    #: OpenAI's chat spelling, `logprobs: true` with `top_logprobs`, is understood too.
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    #: The same of the prompt's tokens.
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    #: Leave the stop string, or the text of the stop token, at the end of the text.
    include_stop_str_in_output: bool = False
    #: Show nothing of special tokens in the text.
    skip_special_tokens: bool = True
    #: Keep only the last tokens of a longer prompt.
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    #: Begin the text with that of the prompt.
    echo: bool = False

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, data: Any) -> Any:
        return _one_logprobs({k: v for k, v in data.items() if v is not None}) if isinstance(data, dict) else data

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_string(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _min_not_above_max(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        return self

    @model_validator(mode="after")
    def _echo_without_logprobs(self) -> SamplingParams:
        if self.echo and self.logprobs is not None:
            raise ValueError("unsupported_parameter: echo is not supported with logprobs; ask for prompt_logprobs")
        return self

    @property
    def greedy(self) -> bool:
        """Whether the draw is the arg max, whatever the other fields say."""
        return self.temperature == 0.0

    @property
    def needs_only_largest(self) -> bool:
        """Whether the largest logit, as the model gives it, decides and no other is looked at."""
        adjusts = self.allowed_token_ids is not None or self.logit_bias or self.min_tokens or self.depends_on_output
        return self.greedy and not adjusts and self.logprobs is None

    @property
    def depends_on_output(self) -> bool:
        """Whether it matters for a draw which tokens were drawn before it, beside what the model makes of them."""
        return bool(
            self.bad_words_token_ids
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
        )


def _one_logprobs(given: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's two spellings in one: a number, or a flag with the number in `top_logprobs`. False means not at all."""
    kept = {k: v for k, v in given.items() if not (k in ("logprobs", "prompt_logprobs") and v is False)}
    top = kept.pop("top_logprobs", 0)
    if kept.get("logprobs") is True:
        kept["logprobs"] = top
    elif top:
        raise ValueError("top_logprobs needs logprobs to be true")
    return kept


def child_seed(seed: int, index: int) -> int:
    """The seed of context `index` of a job with n > 1: BLAKE2b of both as little-endian 64-bit words, 64 bits of it."""
    words = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")
