"""One job that this worker owns, from its claim to its end, and the result that it becomes."""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime

from batonq.engine.sampling_params import SamplingParams
from batonq.producer import serializer
from batonq.producer.schema import FAILURE_TTL, RESULT_TTL, Choice, ErrorInfo, PromptJob, Result, Timings, Usage
from batonq.worker.messages import Update, pack_ids, unpack_ids
from batonq.worker.requests import EffectiveRequest, RefusedJob
from batonq.worker.scripts import Claim, Ending, Fields, Ownership

#: rq's codes for the outcomes of an execution (`rq.results.Result.Type`).
_SUCCESSFUL, _FAILED = 1, 2


@dataclass(frozen=True, slots=True)
class Place:
    """Where results come from: the worker, its queue, what it serves and how it computes."""

    worker: str
    queue: str
    model: str
    numerics_id: str


@dataclass(slots=True, eq=False)
class OwnedJob:
    """A claimed job: its request, the tokens so far, and what the server doesn't know yet."""

    claim: Claim
    request: EffectiveRequest
    claimed_at: float
    owners: list[str]
    numerics: list[str]
    resumes: int
    tokens: list[int]
    #: Tokens that the server has acknowledged.
    num_committed: int
    state: str = "WAITING"
    #: Whether state or tokens changed since the last commit.
    dirty: bool = False
    first_token_at: float | None = None

    @classmethod
    def begin(cls, claim: Claim, request: EffectiveRequest, place: Place, now: float, *, resumed: bool) -> OwnedJob:
        """A job as it is right after its claim."""
        owners = _split(claim.context.get("owners", b"")) if resumed else []
        numerics = _split(claim.context.get("numerics", b"")) if resumed else []
        if place.numerics_id not in numerics:
            numerics.append(place.numerics_id)
        tokens = unpack_ids(claim.tokens) if resumed else []
        return cls(
            claim,
            request,
            now,
            [*owners, place.worker],
            numerics,
            int(claim.context.get("resumes", 0)) + 1 if resumed else 0,
            tokens,
            len(tokens),
            dirty=resumed,
        )

    @property
    def ownership(self) -> Ownership:
        """The fence that its writes carry."""
        return self.claim.ownership

    @property
    def job_id(self) -> str:
        """Id of the job and of its context."""
        return self.claim.ownership.job_id

    @property
    def _client_id(self) -> str | None:
        return self.request.job.client_id

    @property
    def crashes(self) -> int:
        """Deaths of engines that held it, since it last made progress."""
        return int(self.claim.job.get("batonq_crashes", 0))

    def take(self, update: Update, now: float) -> None:
        """Take in what a step did to it."""
        new = unpack_ids(update.new_token_ids)
        self.tokens += new
        self.state = update.state
        self.dirty = True
        if new and self.first_token_at is None:
            self.first_token_at = now

    def fields(self, now: float) -> Fields:
        """What the context's hash says beside the request and the token count."""
        return {
            "state": self.state,
            "owners": ",".join(self.owners),
            "numerics": ",".join(self.numerics),
            "resumes": self.resumes,
            "updated_at": now,
        }

    def pin_fields(self, place: Place, now: float) -> Fields:
        """The whole hash of a context that begins here."""
        request = self.request
        identity: Fields = {
            "job_id": self.job_id,
            "model_id": place.model,
            "queue": place.queue,
            "client_id": request.job.client_id or "",
            "input_token_count": len(request.input_token_ids),
            "token_count": 0,
            "max_tokens": request.sampling.max_tokens or 0,
            "created_at": now,
        }
        return {**identity, **request.to_fields(), **self.fields(now)}

    def uncommitted(self) -> bytes:
        """Tokens that the server hasn't acknowledged, packed."""
        return pack_ids(self.tokens[self.num_committed :])

    def succeed(self, update: Update, place: Place, now: float) -> Ending:
        """Its end, with output."""
        assert update.finish_reason is not None
        prompt, completion = len(self.request.input_token_ids), len(self.tokens)
        choice = Choice(
            index=0,
            text=update.text or "",
            token_ids=self.tokens,
            finish_reason=update.finish_reason,  # type: ignore[arg-type]
        )
        usage = Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            cached_tokens=update.cached_tokens,
            total_tokens=prompt + completion,
        )
        result = self._result(place, now).model_copy(update={"choices": [choice], "usage": usage})
        return _ending(self.claim, place, self._client_id, result, self.claimed_at, now, self.fields(now))

    def fail(self, error: ErrorInfo, place: Place, now: float) -> Ending:
        """Its end, with an error."""
        self.state = "ERROR"
        result = self._result(place, now).model_copy(update={"error": error})
        return _ending(self.claim, place, self._client_id, result, self.claimed_at, now, self.fields(now))

    def _result(self, place: Place, now: float) -> Result:
        job, sampling = self.request.job, self.request.sampling
        return _blank(self.claim, job, place, sampling).model_copy(
            update={
                "numerics": self.numerics,
                "exact": len(self.numerics) == 1,
                "owners": self.owners,
                "resumes": self.resumes,
                "timings": Timings(
                    enqueued=_moment(self.claim.job.get("enqueued_at")),
                    claimed=self.claimed_at,
                    first_token=self.first_token_at,
                    finished=now,
                ),
            }
        )


def refuse(claim: Claim, refused: RefusedJob, place: Place, now: float) -> Ending:
    """The end of a job that never became a context."""
    blank = _blank(claim, refused.job, place, None)
    result = blank.model_copy(update={"error": refused.error, "owners": [place.worker]})
    context: Fields = {"state": "ERROR", "job_id": claim.ownership.job_id, "updated_at": now}
    return _ending(claim, place, refused.client_id, result, now, now, context)


def _blank(claim: Claim, job: PromptJob | None, place: Place, sampling: SamplingParams | None) -> Result:
    return Result(
        id=claim.ownership.job_id,
        custom_id=job.custom_id if job else None,
        model=place.model,
        seed=sampling.seed if sampling else None,
        effective=sampling,
        metadata=job.metadata if job else None,
    )


def _ending(
    claim: Claim, place: Place, client_id: str | None, result: Result, started: float, ended: float, context: Fields
) -> Ending:
    status = "finished" if result.error is None else "failed"
    entry: Fields = {
        "type": _SUCCESSFUL if status == "finished" else _FAILED,
        "worker_name": place.worker,
        "return_value": base64.b64encode(serializer.dumps(result.model_dump(mode="json"))),
        "execution_id": claim.ownership.execution_id,
        "execution_started_at": started,
        "execution_ended_at": ended,
    }
    if result.error is not None:
        reason = f"{result.error.code}: {result.error.message}"
        entry["exc_string"] = base64.b64encode(zlib.compress(reason.encode()))
    return Ending(
        claim.ownership,
        place.queue,
        place.worker,
        status,
        entry,
        ended,
        ended - started,
        RESULT_TTL if status == "finished" else FAILURE_TTL,
        client_id,
        context,
    )


def _split(packed: bytes) -> list[str]:
    return packed.decode().split(",") if packed else []


def _moment(text: bytes | None) -> float | None:
    """Unix seconds of rq's notation."""
    if not text:
        return None
    return datetime.strptime(text.decode(), "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC).timestamp()
