"""Errors of a worker: what an operator can mend."""

from __future__ import annotations


class WorkerError(Exception):
    """A stable `code` and a message with the values in it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ModelUnavailable(WorkerError):
    """The engine can't be built; starting it again would not help."""


class EngineUnavailable(WorkerError):
    """The engine's process died again and again before it was ready."""
