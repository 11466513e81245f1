"""Errors of the engine that are some request's or some model's fault, with what a user needs to mend them."""

from __future__ import annotations


class EngineError(Exception):
    """Base of all: a stable `code`, a message with the values in it, and the parameter at fault where one is."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class ContextLengthExceeded(EngineError):
    """The input leaves no room for even one output token."""

    def __init__(self, input_tokens: int, limit: int, what: str) -> None:
        super().__init__(
            "context_length_exceeded",
            f"the input has {input_tokens} tokens; {what} holds {limit}, output included",
            "prompt",
        )
        self.input_tokens = input_tokens
        self.limit = limit


class InvalidTokenIds(EngineError):
    """An input token id that the model's vocabulary does not have, or no token at all."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid_token_ids", message, "token_ids")


class DuplicateContext(EngineError):
    """A context id that the engine is already running."""

    def __init__(self, context_id: str) -> None:
        super().__init__("duplicate_context", f"context {context_id} is already in the engine")


class IllegalTransition(RuntimeError):
    """A bug: a context was asked to change state in a way that its life does not have."""
