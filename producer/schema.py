"""The wire contract: what a job asks for and what its result says.

A job is an rq job whose function is `FUNCTION` and whose keyword arguments are `PromptJob`'s fields; its return value
is `Result`'s fields. Both travel as msgpack (`producer/serializer.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from batonq.engine.sampling_params import UNSUPPORTED_PARAMETERS, SamplingParams, TokenId

#: The function name of every job. A worker knows it as a name and runs no function that a job names.
FUNCTION = "batonq.worker.tasks.generate"

SCHEMA_VERSION: Final = 1

#: How long rq keeps what became of a job, in seconds: 7 days.
RESULT_TTL = FAILURE_TTL = 7 * 24 * 3600

JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")

FinishReason = Literal["stop", "length", "abort", "error"]


class ErrorInfo(BaseModel):
    """Why a job has no output, in the shape of OpenAI's error object."""

    code: str
    message: str
    #: Dotted path of the field at fault, where one is (`sampling.top_p`).
    param: str | None = None


class Message(BaseModel):
    """One turn of a conversation. Content is text: a list of text parts is joined, other kinds of part are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Annotated[str, Field(min_length=1)]
    content: str
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_text_parts(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        for index, part in enumerate(value):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"part {index} is not of type text; only text can be read")
        return "".join(part["text"] for part in value)


class PromptJob(BaseModel):
    """One prompt and what to do with it. Exactly one of `prompt`, `token_ids` and `messages` is given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = SCHEMA_VERSION
    #: Also rq's job id. None: one is made at submission.
    id: str | None = None
    #: The caller's own name for the row, returned untouched.
    custom_id: str | None = None
    #: Served model name; None takes whatever the queue's workers serve.
    model: str | None = None
    prompt: str | None = None
    token_ids: tuple[TokenId, ...] | None = None
    messages: tuple[Message, ...] | None = None
    sampling: SamplingParams = SamplingParams()
    #: Outputs to draw, each with a seed of its own that follows from `sampling.seed`.
    n: Annotated[int, Field(ge=1, le=128)] = 1
    #: Publish text as it grows (`keys.stream`), beside the result.
    stream: bool = False
    #: Lower numbers first, as in vLLM, among the jobs that a worker holds; claims follow the queues' order alone.
    priority: int = 0
    #: Who is told, on the list `keys.done(client_id)`, when the job has ended.
    client_id: str | None = None
    #: Milliseconds of Unix time after which no output is wanted any more.
    deadline: int | None = None
    exact: Literal["prefer", "require"] = "prefer"
    metadata: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data

    @field_validator("id", "client_id")
    @classmethod
    def _safe_in_a_key(cls, value: str | None) -> str | None:
        if value is not None and not JOB_ID.fullmatch(value):
            raise ValueError(f"{value!r} is not 1 to 128 of the characters A-Z a-z 0-9 _ -")
        return value

    @model_validator(mode="after")
    def _one_input(self) -> PromptJob:
        given = [name for name in ("prompt", "token_ids", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"exactly one of prompt, token_ids and messages is needed, got {' and '.join(given) or 'none'}"
            )
        if not getattr(self, given[0]):
            raise ValueError(f"{given[0]} is empty")
        return self

    @model_validator(mode="after")
    def _echo_of_text(self) -> PromptJob:
        if self.sampling.echo and self.messages is not None:
            raise ValueError("unsupported_parameter: sampling.echo is not supported with messages")
        return self

    def to_kwargs(self) -> dict[str, Any]:
        """The keyword arguments of the rq job: plain data, defaults left out."""
        return self.model_dump(mode="json", exclude_defaults=True) | {"schema_version": self.schema_version}


def job_from_flat(fields: Mapping[str, Any]) -> PromptJob:
    """A job from its own fields and its sampling fields side by side. Raises ValidationError."""
    if fields.get("sampling") is not None:
        return PromptJob.model_validate(dict(fields))
    own = {name: value for name, value in fields.items() if name in PromptJob.model_fields}
    sampling = {name: value for name, value in fields.items() if name not in own}
    return PromptJob.model_validate(own | {"sampling": sampling})


class Usage(BaseModel):
    """Token counts of a result."""

    prompt_tokens: int
    completion_tokens: int
    #: Prompt tokens whose KV blocks were found in the prefix cache.
    cached_tokens: int
    total_tokens: int


class TopLogprob(BaseModel):
    """A token and its log probability. `bytes` are what it adds to a text; `token` is them as text, U+FFFD for a part
    of a character."""

    token: str
    token_id: int
    bytes: list[int]
    logprob: float


class TokenLogprob(TopLogprob):
    """A token of the output or the prompt, with the most likely tokens in its place, in order.

    Log probabilities are of the model's own distribution, before any sampling parameter; none is below -9999. `rank`
    counts from 1.
    """

    rank: int
    top_logprobs: list[TopLogprob] = []


class Choice(BaseModel):
    """One of the `n` outputs."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    #: One for each token id, if asked for.
    logprobs: list[TokenLogprob] | None = None


class Timings(BaseModel):
    """When it happened: seconds of Unix time by the clocks of producer (`enqueued`) and worker (the others)."""

    enqueued: float | None = None
    claimed: float | None = None
    first_token: float | None = None
    finished: float | None = None


class Result(BaseModel):
    """What became of a job: `choices` with output, or `error`."""

    schema_version: int = SCHEMA_VERSION
    id: str
    custom_id: str | None = None
    model: str
    choices: list[Choice] = []
    #: One for each token of the prompt, if asked for; None for the first, which nothing precedes.
    prompt_logprobs: list[TokenLogprob | None] | None = None
    usage: Usage | None = None
    seed: int | None = None
    #: The sampling parameters as they were carried out, `max_tokens` and `seed` included.
    effective: SamplingParams | None = None
    numerics: list[str] = []
    exact: bool = True
    timings: Timings = Timings()
    #: Names of the workers that owned the job, in order.
    owners: list[str] = []
    resumes: int = 0
    error: ErrorInfo | None = None
    metadata: dict[str, Any] | None = None


def error_from_validation(error: ValidationError) -> ErrorInfo:
    """The first thing wrong with an input, as an error for its sender: which field, what is wrong, the value."""
    first = error.errors(include_url=False)[0]
    location = [part for part in first["loc"] if part not in ("tuple", "function-before")]
    param = ".".join(str(part) for part in location) or None
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        name = str(location[-1])
        if name in UNSUPPORTED_PARAMETERS:
            return ErrorInfo(code="unsupported_parameter", message=f"{name} is not supported", param=param)
        return ErrorInfo(code="unknown_parameter", message=f"there is no parameter {name}", param=param)
    if message.startswith("unsupported_parameter: "):
        message = message.removeprefix("unsupported_parameter: ")
        param = ".".join(map(str, (*location, message.split(" ", 1)[0])))
        return ErrorInfo(code="unsupported_parameter", message=message, param=param)
    value = repr(first["input"])
    shown = value if len(value) <= 80 else value[:77] + "..."
    where = f"{param}: " if param else ""
    suffix = "" if first["type"] == "value_error" else f" (got {shown})"
    return ErrorInfo(code="invalid_parameter", message=f"{where}{message}{suffix}", param=param)


def error_from_flat(error: ValidationError) -> ErrorInfo:
    """As `error_from_validation`, with the fields named as `job_from_flat` takes them (`top_p`)."""
    info = error_from_validation(error)
    message = info.message.removeprefix("sampling: ").removeprefix("sampling.")
    param = (info.param or "").removeprefix("sampling.") or None
    if param == "sampling":  # two fields contradict each other; the message begins with the one at fault
        param = message.split(" ", 1)[0]
    return ErrorInfo(code=info.code, message=message, param=param)
