"""What a request may ask of the sampler, and when its output ends.

Shared by the wire schema (`producer/schema.py`) and the engine, so it imports nothing but pydantic. Names and defaults
are vLLM's and OpenAI's; semantics that differ between those are spelt out at the field.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MAX_SEED = 2**64 - 1

#: Parameters that users of OpenAI's or vLLM's API know and that this version does not carry out. They are refused by
#: name: ignoring one would return other text than was asked for.
UNSUPPORTED_PARAMETERS = frozenset(
    {
        "allowed_token_ids",
        "audio",
        "bad_words",
        "best_of",
        "echo",
        "frequency_penalty",
        "function_call",
        "functions",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "include_stop_str_in_output",
        "length_penalty",
        "logit_bias",
        "logprobs",
        "modalities",
        "parallel_tool_calls",
        "prediction",
        "presence_penalty",
        "prompt_logprobs",
        "reasoning_effort",
        "repetition_penalty",
        "response_format",
        "skip_special_tokens",
        "structured_outputs",
        "suffix",
        "tool_choice",
        "tools",
        "top_logprobs",
        "truncate_prompt_tokens",
        "use_beam_search",
        "web_search_options",
    }
)

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class SamplingParams(BaseModel):
    """How the tokens of one context are drawn and when they end. Frozen; `None` for a field means its default.

    The filters apply in this order: temperature, `top_k`, `top_p` over what `top_k` left, `min_p` against the most
    likely token. With temperature 0 the draw is greedy and no filter matters.
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
    #: The text ends before the first occurrence of any of these, wherever token borders fall.
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False
    #: 64 bits; chosen when the job is first claimed if not given.
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_string(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _min_not_above_max(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        return self

    @property
    def greedy(self) -> bool:
        """Whether the draw is the arg max, whatever the other fields say."""
        return self.temperature == 0.0
