"""From a claimed job to its effective request: what exactly will be computed, pinned for every later owner.

The effective request is token ids, sampling parameters with `max_tokens` and seed, and a digest of the job. It is made
by the first worker that claims the job and stored in the context's hash; a later owner takes it from there, so nothing
depends on its own templates, limits or dice.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack
from pydantic import ValidationError

from batonq.engine import logprobs
from batonq.engine.errors import EngineError
from batonq.engine.limits import Limits, effective_request
from batonq.engine.sampling_params import SamplingParams
from batonq.producer import serializer
from batonq.producer.schema import FUNCTION, JOB_ID, ErrorInfo, PromptJob, error_from_validation
from batonq.worker.messages import pack_ids, unpack_ids
from batonq.worker.scripts import Claim, Fields

#: Version of the context's hash, and the least major version that a reader of it must know. A minor only adds fields
#: that a reader may ignore, and a writer keeps those that it doesn't know. 1.1 added `min_reader` and `exact`.
CONTEXT_SCHEMA = "1.1"
CONTEXT_READER = 1


class Frontend(Protocol):
    """Token ids from what a job says."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt."""

    def encode_word(self, text: str) -> list[int]:
        """Token ids of a text with nothing put around it."""

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation."""


class RefusedJob(Exception):
    """A job that can't be run, through its own fault. `job` is None if not even that could be read; `client_id` is who
    waits for it, as far as that can be told."""

    def __init__(self, error: ErrorInfo, job: PromptJob | None = None, client_id: object = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.job = job
        known = job.client_id if job else client_id
        self.client_id = known if isinstance(known, str) and JOB_ID.fullmatch(known) else None


@dataclass(frozen=True, slots=True)
class EffectiveRequest:
    """What is computed for a job."""

    job: PromptJob
    digest: str
    input_token_ids: tuple[int, ...]
    sampling: SamplingParams

    def to_fields(self) -> Fields:
        """The part of the context's hash that pins the request."""
        request = {"input": pack_ids(self.input_token_ids), "sampling": self.sampling.model_dump(mode="json")}
        return {
            "schema": CONTEXT_SCHEMA,
            "min_reader": CONTEXT_READER,
            "digest": self.digest,
            "exact": self.job.exact,
            "request": msgpack.packb(request),
        }


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads claimed jobs for one served model."""

    served_model_name: str
    frontend: Frontend
    limits: Limits
    weights_id: str

    def read(self, claim: Claim) -> tuple[EffectiveRequest, bool]:
        """The effective request, and whether an earlier owner had pinned it. Raises RefusedJob."""
        data = _job_data(claim)
        job = _parse(data)
        if int(claim.job.get("repeats_left") or 0) > 0:
            message = "rq's Repeat is not supported: a prompt's result would be overwritten by the next"
            raise RefusedJob(ErrorInfo(code="unsupported_parameter", message=message, param="repeat"), job)
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        try:
            if job.model is not None and job.model != self.served_model_name:
                raise EngineError(
                    "model_not_found", f"{job.model} is not served here, {self.served_model_name} is", "model"
                )
            if self._begun(claim, digest):
                return self._pinned(claim, job, digest), True
            ids, sampling = effective_request(self.limits, self.frontend, self._encode(job), job.sampling)
            return EffectiveRequest(job, digest, ids, sampling), False
        except EngineError as error:
            raise RefusedJob(ErrorInfo(code=error.code, message=error.message, param=error.param), job) from error

    def _encode(self, job: PromptJob) -> Sequence[int]:
        if job.messages is not None:
            return self.frontend.encode_chat([message.model_dump(exclude_none=True) for message in job.messages])
        return self.frontend.encode(job.prompt) if job.prompt is not None else job.token_ids or ()

    def _begun(self, claim: Claim, digest: str) -> bool:
        """Whether an earlier owner pinned this very job, so that it can be carried on; else it begins anew."""
        fields = claim.contexts[0].fields
        if fields.get("digest") != digest.encode():
            return False
        if fields.get("weights", self.weights_id.encode()) == self.weights_id.encode():
            return True
        if any(context.tokens for context in claim.contexts):
            message = f"the job has tokens that other weights of {self.served_model_name} made, and no worker has these"
            raise EngineError("model_changed", message, "model")
        return False

    def _pinned(self, claim: Claim, job: PromptJob, digest: str) -> EffectiveRequest:
        try:
            ids, sampling = self._read_request(claim)
            self._check_outputs(claim, sampling)
        except (ValueError, TypeError, KeyError, AttributeError, struct.error, msgpack.UnpackException) as error:
            message = f"what Redis holds of the job's contexts can't be read: {type(error).__name__}: {error}"
            raise EngineError("unreadable_context", message) from error
        if self.limits.effective(ids, sampling) != sampling:
            raise EngineError(
                "context_length_exceeded",
                f"the context was begun where {len(ids)} + {sampling.max_tokens} tokens fit; this worker's model holds "
                f"{self.limits.max_model_len} and its cache {self.limits.kv_cache_tokens}",
            )
        return EffectiveRequest(job, digest, ids, sampling)

    def _read_request(self, claim: Claim) -> tuple[tuple[int, ...], SamplingParams]:
        request = msgpack.unpackb(claim.contexts[0].fields["request"])
        known = {name: value for name, value in request["sampling"].items() if name in SamplingParams.model_fields}
        ids = tuple(unpack_ids(request["input"]))
        if not all(token < self.limits.vocab_size for token in ids):
            raise ValueError(f"an input token of {max(ids)}, where the vocabulary has {self.limits.vocab_size}")
        return ids, SamplingParams(**known)

    def _check_outputs(self, claim: Claim, sampling: SamplingParams) -> None:
        """Raises ValueError or struct.error for what no worker would have written."""
        for context in claim.contexts:
            ids = unpack_ids(context.tokens)
            if len(ids) > (sampling.max_tokens or 0):
                raise ValueError(f"{len(ids)} tokens, where at most {sampling.max_tokens} were asked for")
            if not all(token < self.limits.vocab_size for token in ids):
                raise ValueError(f"an output token of {max(ids)}, where the vocabulary has {self.limits.vocab_size}")
            entries = [] if sampling.logprobs is None else logprobs.unpack(context.logprobs, sampling.logprobs)
            if sampling.logprobs is not None and [entry.token_id for entry in entries] != ids:
                raise ValueError(f"log probabilities of {len(entries)} tokens for {len(ids)} others")
        int(claim.contexts[0].fields.get("resumes", 0))
        for name in ("owners", "numerics"):
            claim.contexts[0].fields.get(name, b"").decode()


def _job_data(claim: Claim) -> bytes:
    raw = claim.job.get("data", b"")
    try:
        return zlib.decompress(raw)
    except zlib.error:
        return raw  # rq takes uncompressed data too


def _parse(data: bytes) -> PromptJob:
    try:
        function, _, positional, fields = serializer.loads(data)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        message = f"the job can't be read ({error}); enqueue it with serializer=batonq.producer.serializer"
        raise RefusedJob(ErrorInfo(code="unreadable_job", message=message)) from error
    if function != FUNCTION:
        raise RefusedJob(
            ErrorInfo(
                code="unknown_function", message=f"the job's function is {function!r}; only {FUNCTION} is run here"
            )
        )
    if positional or not isinstance(fields, dict):
        raise RefusedJob(
            ErrorInfo(code="invalid_parameter", message=f"{FUNCTION} takes keyword arguments only, got {positional!r}")
        )
    try:
        return PromptJob.model_validate(fields)
    except ValidationError as error:
        raise RefusedJob(error_from_validation(error), client_id=fields.get("client_id")) from error
