"""The result that a job becomes, with output or an error, and rq's record of it."""

from __future__ import annotations

import base64
import zlib
from datetime import UTC, datetime
from typing import Any

from batonq.engine.sampling_params import SamplingParams
from batonq.producer import serializer
from batonq.producer.schema import FAILURE_TTL, RESULT_TTL, Choice, ErrorInfo, PromptJob, Result, Timings, Usage
from batonq.worker.owned import OwnedContext, OwnedJob, Place
from batonq.worker.requests import RefusedJob
from batonq.worker.scripts import Claim, ContextEnd, Ending, Fields

#: rq's codes for the outcomes of an execution (`rq.results.Result.Type`).
_SUCCESSFUL, _FAILED = 1, 2

#: Errors that another try may spare, so that rq's `Retry` applies to them. Any other would only come again.
TRANSIENT = frozenset({"engine_crashed", "worker_lost", "job_timeout"})


def succeed(job: OwnedJob, place: Place, now: float) -> Ending:
    """The end of a job all of whose contexts have ended with output."""
    endings = [context.ending for context in job.contexts if context.ending is not None]
    prompt, completion = len(job.request.input_token_ids), sum(len(context.tokens) for context in job.contexts)
    usage = Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=min(ending.cached_tokens for ending in endings),
        total_tokens=prompt + completion,
    )
    choices = [_choice(index, context) for index, context in enumerate(job.contexts)]
    result = _result(job, place, now, choices=choices, usage=usage, prompt_logprobs=endings[0].prompt_logprobs)
    entry = _entry(job.claim, place, _SUCCESSFUL, result, job.claimed_at, now)
    return Ending(
        job.ownership,
        job.claim.queue,
        place.worker,
        "finished",
        entry,
        now,
        now - job.claimed_at,
        RESULT_TTL,
        job.request.job.client_id,
        [context.end(job.fields(context, now)) for context in job.contexts],
    )


def fail(job: OwnedJob, error: ErrorInfo, place: Place, now: float, *, status: str = "failed") -> Ending:
    """The end of a job without output; `status` is "stopped" where somebody asked for it."""
    for context in job.contexts:
        context.state = "ERROR"
    result = _result(job, place, now, error=error)
    contexts = [(context.context_id, job.fields(context, now)) for context in job.contexts]
    return _failure(job.claim, place, status, result, job.request.job.client_id, job.claimed_at, now, contexts)


def refuse(claim: Claim, refused: RefusedJob, place: Place, now: float) -> Ending:
    """The end of a job that never became a context."""
    result = _blank(claim, refused.job, place, None, error=refused.error, owners=[place.worker])
    return _failure(claim, place, "failed", result, refused.client_id, now, now, [])


def _choice(index: int, context: OwnedContext) -> Choice:
    ending = context.ending
    assert ending is not None
    return Choice(
        index=index,
        text=ending.text or "",
        token_ids=context.tokens,
        finish_reason=ending.finish_reason,  # type: ignore[arg-type]
        logprobs=ending.logprobs,  # type: ignore[arg-type]
    )


def _result(job: OwnedJob, place: Place, now: float, **more: Any) -> Result:
    timings = Timings(
        enqueued=_moment(job.claim.job.get("enqueued_at")),
        claimed=job.claimed_at,
        first_token=job.first_token_at,
        finished=now,
    )
    return _blank(
        job.claim,
        job.request.job,
        place,
        job.request.sampling,
        numerics=job.numerics,
        exact=len(job.numerics) == 1,
        owners=job.owners,
        resumes=job.resumes,
        timings=timings,
        **more,
    )


def _blank(claim: Claim, job: PromptJob | None, place: Place, sampling: SamplingParams | None, **more: Any) -> Result:
    return Result(
        id=claim.ownership.job_id,
        custom_id=job.custom_id if job else None,
        model=place.model,
        seed=sampling.seed if sampling else None,
        effective=sampling,
        metadata=job.metadata if job else None,
        **more,
    )


def _failure(
    claim: Claim,
    place: Place,
    status: str,
    result: Result,
    client_id: str | None,
    started: float,
    ended: float,
    contexts: list[tuple[str, Fields]],
) -> Ending:
    error = result.error
    assert error is not None
    entry = _entry(claim, place, _FAILED, result, started, ended)
    entry["exc_string"] = base64.b64encode(zlib.compress(f"{error.code}: {error.message}".encode()))
    return Ending(
        claim.ownership,
        claim.queue,
        place.worker,
        status,
        entry,
        ended,
        ended - started,
        FAILURE_TTL,
        client_id,
        [ContextEnd(context_id, 0, fields) for context_id, fields in contexts],
        (error.code, error.message),
        transient=status == "failed" and error.code in TRANSIENT,
    )


def _entry(claim: Claim, place: Place, kind: int, result: Result, started: float, ended: float) -> Fields:
    return {
        "type": kind,
        "worker_name": place.worker,
        "return_value": base64.b64encode(serializer.dumps(result.model_dump(mode="json"))),
        "execution_id": claim.ownership.execution_id,
        "execution_started_at": started,
        "execution_ended_at": ended,
    }


def _moment(text: bytes | None) -> float | None:
    """Unix seconds of rq's notation."""
    if not text:
        return None
    return datetime.strptime(text.decode(), "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC).timestamp()
