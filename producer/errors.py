"""What can go wrong on the producer's side, as types.

Each error has a code for programs, a message for people, the parameter at fault where one is, and the values that the
message speaks of.
"""

from __future__ import annotations

from typing import Any

from batonq.producer.schema import ErrorInfo


class ProducerError(Exception):
    """Base of all. `code` is stable, `message` is one sentence, `values` holds what it was made from."""

    def __init__(self, code: str, message: str, *, param: str | None = None, **values: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.values = values

    def info(self) -> ErrorInfo:
        """The error in the shape in which results and output rows carry it."""
        return ErrorInfo(code=self.code, message=self.message, param=self.param)


class JobError(ProducerError):
    """A job cannot be made from what was given."""


class RowError(ProducerError):
    """A line of the input cannot be run."""


class JobNotFoundError(ProducerError):
    """Redis knows no such job: it was never submitted, was deleted, or its result is older than its TTL."""

    def __init__(self, job_id: str) -> None:
        super().__init__("job_not_found", f"there is no job {job_id}", job_id=job_id)


class ContextNotFoundError(ProducerError):
    """Redis knows neither a context nor a job of this id: it never was, was deleted, or is older than its TTL."""

    def __init__(self, context_id: str) -> None:
        super().__init__("context_not_found", f"there is no context or job {context_id}", context_id=context_id)


class ResultTimeoutError(ProducerError):
    """The job had not ended when the wait was over. It goes on; ask again."""

    def __init__(self, job_id: str, seconds: float) -> None:
        super().__init__(
            "result_timeout", f"job {job_id} had not ended after {seconds:g} s", job_id=job_id, seconds=seconds
        )


class JobFailedError(ProducerError):
    """A job whose stream was being read failed, or was stopped or canceled. `code` and `message` are the job's."""

    def __init__(self, job_id: str, error: ErrorInfo) -> None:
        super().__init__(error.code, error.message, param=error.param, job_id=job_id)


class StreamTrimmedError(ProducerError):
    """The beginning of a stream that was asked for is there no more; the result has the whole text."""

    def __init__(self, context_id: str, start: int, first: int) -> None:
        super().__init__(
            "stream_trimmed",
            f"the stream of {context_id} was asked for from token {start}, and begins with token {first}",
            context_id=context_id,
            start=start,
            first=first,
        )


class InputError(ProducerError):
    """The input of a run, or the options it came with, cannot be worked on. Nothing was enqueued."""


class StateError(ProducerError):
    """The output or the state directory does not belong to this run, or another process holds it."""


class ServerError(ProducerError):
    """The embedded server cannot be started, or has died."""


class WorkerError(ProducerError):
    """The worker that a run started has died for good."""
