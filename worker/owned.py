"""One job that this worker owns, from its claim to its end: its contexts, and what the server doesn't know of them yet.

A job has one context, or `n` of them, each with a seed of its own; they are claimed, given back and ended together.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from batonq.engine.sampling_params import SamplingParams, child_seed
from batonq.producer.keys import context_ids
from batonq.producer.schema import ErrorInfo
from batonq.worker.messages import Update, pack_ids, unpack_ids
from batonq.worker.requests import EffectiveRequest
from batonq.worker.scripts import Claim, ContextCommit, ContextEnd, Fields, Loss, Mirror, Ownership, StreamEntry, iso

#: Seconds after which a growing context's hash shows how far it is; its tokens are committed far more often.
MIRROR_INTERVAL = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where results come from: the worker, what it serves, and with which arithmetic and weights."""

    worker: str
    model: str
    numerics_id: str
    weights_id: str


@dataclass(slots=True, eq=False)
class OwnedContext:
    """One output in the making: its tokens so far, and how far the server has them."""

    context_id: str
    #: Effective, with this context's own seed.
    sampling: SamplingParams
    streaming: bool
    tokens: list[int]
    #: Packed log probabilities of `tokens`, if asked for.
    logprobs: bytearray
    #: Tokens that the server has acknowledged.
    num_committed: int
    state: str = "WAITING"
    #: The state that its hash shows, and since when; None if the hash knows nothing of this ownership yet.
    mirrored_state: str | None = None
    mirrored_at: float = 0.0
    #: What the engine said last of it, once it has ended.
    ending: Update | None = None
    #: Text of the tokens after the first `_num_streamed`, as far as it can be shown.
    _text: str = ""
    #: Tokens that are in stream entries, those of the server or `_entries`.
    _num_streamed: int = 0
    #: Entries that the server may not have. One that was sent stays as it is until it is acknowledged.
    _entries: list[StreamEntry] = field(default_factory=list)

    @classmethod
    def begin(cls, context_id: str, sampling: SamplingParams, streaming: bool, mirror: Mirror | None) -> OwnedContext:
        """A context as earlier owners left it, or new."""
        tokens = unpack_ids(mirror.tokens) if mirror else []
        packed = bytearray(mirror.logprobs) if mirror else bytearray()
        own = cls(context_id, sampling, streaming, tokens, packed, len(tokens))
        own._num_streamed = len(tokens)
        return own

    @property
    def dirty(self) -> bool:
        """Whether anything changed since the last commit."""
        return len(self.tokens) > self.num_committed or self.state != self.mirrored_state

    def stale(self, now: float) -> bool:
        """Whether its hash has to be written again."""
        return self.state != self.mirrored_state or now >= self.mirrored_at + MIRROR_INTERVAL

    def grow(self, token_id: int) -> None:
        """Take in a token, where that is all there is to know."""
        self.tokens.append(token_id)
        self.state = "RUNNING"

    def take(self, update: Update) -> None:
        """Take in what a step did to it."""
        self.tokens += unpack_ids(update.new_token_ids)
        self.logprobs += update.new_logprobs
        self._text += update.new_text
        self.state = update.state
        if update.finish_reason is not None:
            self.ending = update

    def news(self, fields: Fields) -> ContextCommit:
        """What the server hasn't acknowledged of tokens and text, with these fields of its hash."""
        start = self.num_committed
        packed = self._packed_logprobs(start) if self.logprobs else b""
        entries = self._stream() if self.streaming else ()
        return ContextCommit(self.context_id, start, pack_ids(self.tokens[start:]), packed, fields, entries)

    def end(self, fields: Fields) -> ContextEnd:
        """Its part of the job's end."""
        return ContextEnd(self.context_id, self.num_committed, fields, self._stream() if self.streaming else ())

    def acknowledge(self, now: float) -> None:
        """The server has all that `news` said last, at `now`."""
        self.num_committed = len(self.tokens)
        self._entries = []
        if self.stale(now):
            self.mirrored_state, self.mirrored_at = self.state, now

    def _packed_logprobs(self, start: int) -> bytes:
        return bytes(self.logprobs[len(self.logprobs) // len(self.tokens) * start :]) if self.tokens else b""

    def _stream(self) -> list[StreamEntry]:
        """The entries that the server may not have. They grow by what is new; none that was given out changes."""
        end = len(self.tokens)
        if end > self._num_streamed:
            start, self._num_streamed = self._num_streamed, end
            fields: Fields = {"text": self._text, "token_ids": pack_ids(self.tokens[start:])}
            if self.logprobs:
                fields["logprobs"] = self._packed_logprobs(start)
            self._text = ""
            self._entries.append(StreamEntry(end, fields))
        if self.ending is not None and not (self._entries and self._entries[-1].last):
            mark: Fields = {"text": self.ending.last_text, "finish_reason": self.ending.finish_reason or ""}
            self._entries.append(StreamEntry(end, mark, last=True))
        return list(self._entries)


@dataclass(slots=True, eq=False)
class OwnedJob:
    """A claimed job: its request, its contexts in order, and whose hands they went through."""

    claim: Claim
    request: EffectiveRequest
    claimed_at: float
    contexts: list[OwnedContext]
    owners: list[str]
    numerics: list[str]
    resumes: int
    #: Deaths of engines in a step that held it, and of workers that owned it, since its last progress.
    crashes: int
    lapses: int
    #: When its own deadline is over, by Unix time.
    deadline_at: float
    #: When rq's timeout, which counts from the claim, is over by the monotonic clock.
    timeout_at: float
    #: When the first token of this ownership was there.
    first_token_at: float | None = None

    @classmethod
    def begin(cls, claim: Claim, request: EffectiveRequest, place: Place, now: float, *, resumed: bool) -> OwnedJob:
        """A job as it is right after its claim."""
        past = claim.contexts[0].fields if resumed else {}
        # Tokens that are there were made by the last of them; where there are none yet, none counts.
        begun = resumed and any(mirror.tokens for mirror in claim.contexts)
        numerics = _split(past.get("numerics", b"")) if begun else []
        if place.numerics_id not in numerics[-1:]:
            numerics.append(place.numerics_id)
        n = request.job.n
        contexts = [
            OwnedContext.begin(
                context_id,
                request.sampling if n == 1 else _for_child(request.sampling, index),
                request.job.stream,
                claim.contexts[index] if resumed else None,
            )
            for index, context_id in enumerate(context_ids(claim.ownership.job_id, n))
        ]
        owners = [*_split(past.get("owners", b"")), place.worker]
        resumes = int(past.get("resumes", 0)) + 1 if resumed else 0
        crashes, lapses = (_count(claim.job, f"batonq_{name}") for name in ("crashes", "lapses"))
        timeout = _count(claim.job, "timeout")
        timeout_at = time.monotonic() + timeout if timeout > 0 else math.inf
        deadline_at = math.inf if request.job.deadline is None else request.job.deadline / 1000
        return cls(claim, request, now, contexts, owners, numerics, resumes, crashes, lapses, deadline_at, timeout_at)

    @property
    def ownership(self) -> Ownership:
        """The fence that its writes carry."""
        return self.claim.ownership

    @property
    def job_id(self) -> str:
        """Id of the job."""
        return self.claim.ownership.job_id

    @property
    def dirty(self) -> bool:
        """Whether the server doesn't know all about it."""
        return any(context.dirty for context in self.contexts)

    @property
    def history(self) -> str:
        """What happened to it before this claim, event by event, for an error's reader."""
        lines = self.claim.job.get("batonq_history", b"").decode().splitlines()
        return "; ".join(f"{event} by {worker}" for _, event, worker, *_ in map(str.split, lines))

    @property
    def run_ahead(self) -> int:
        """Tokens of its contexts that the server has not acknowledged, the most of any."""
        return max(len(context.tokens) - context.num_committed for context in self.contexts)

    @property
    def ended(self) -> bool:
        """Whether all of its contexts have ended."""
        return all(context.ending is not None for context in self.contexts)

    @property
    def loss(self) -> Loss:
        """What to clear away once it is no longer ours."""
        names = [context.context_id for context in self.contexts]
        return Loss(self.ownership, self.claim.queue, names, self.request.job.client_id)

    def take(self, context: OwnedContext, update: Update, now: float) -> None:
        """Take in what a step did to one of its contexts."""
        context.take(update)
        if update.new_token_ids and self.first_token_at is None:
            self.first_token_at = now

    def overdue(self, now: float, monotonic: float) -> ErrorInfo | None:
        """Why its time is over, if it is, by these clocks."""
        if now >= self.deadline_at:
            return ErrorInfo(code="deadline_exceeded", message=f"the deadline was {iso(self.deadline_at)}")
        if monotonic < self.timeout_at:
            return None
        timeout = _count(self.claim.job, "timeout")
        return ErrorInfo(code="job_timeout", message=f"the job ran longer than its timeout of {timeout} s")

    def news(self, now: float) -> list[ContextCommit]:
        """What the server hasn't acknowledged."""
        # Of a job that is under suspicion always with fields: with these the script also forgets the deaths.
        suspect = self.crashes or self.lapses
        return [
            context.news(self.fields(context, now) if suspect or context.stale(now) else {})
            for context in self.contexts
            if context.dirty
        ]

    def fields(self, context: OwnedContext, now: float) -> Fields:
        """What a context's hash says beside the request."""
        return {
            "state": context.state,
            "token_count": len(context.tokens),
            "owners": ",".join(self.owners),
            "numerics": ",".join(self.numerics),
            "resumes": self.resumes,
            "updated_at": now,
        }

    def pin_fields(self, place: Place, now: float) -> list[tuple[str, Fields]]:
        """The whole hashes of contexts that begin here. The request stands in the first one, for all."""
        pinned = []
        for index, context in enumerate(self.contexts):
            identity: Fields = {
                "job_id": self.job_id,
                "index": index,
                "model_id": place.model,
                "weights": place.weights_id,
                "queue": self.claim.queue,
                "client_id": self.request.job.client_id or "",
                "priority": self.request.job.priority,
                "input_token_count": len(self.request.input_token_ids),
                "max_tokens": context.sampling.max_tokens or 0,
                "created_at": now,
            }
            request = self.request.to_fields() if index == 0 else {}
            pinned.append((context.context_id, {**identity, **request, **self.fields(context, now)}))
        return pinned


def _for_child(sampling: SamplingParams, index: int) -> SamplingParams:
    assert sampling.seed is not None
    return sampling.model_copy(update={"seed": child_seed(sampling.seed, index)})


def _count(fields: dict[str, bytes], name: str) -> int:
    """A number of a job's hash; 0 for anything else that stands there."""
    text = fields.get(name, b"")
    return int(text) if text.isdigit() else 0


def _split(packed: bytes) -> list[str]:
    return packed.decode().split(",") if packed else []
