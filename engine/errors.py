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


class EngineBusy(EngineError):
    """Something was asked for that can't be done while contexts are in the engine."""

    def __init__(self, what: str, contexts: int) -> None:
        super().__init__("engine_busy", f"{what} is refused while the engine has {contexts} contexts")
        self.contexts = contexts


class IllegalTransition(RuntimeError):
    """A bug: a context was asked to change state in a way that its life does not have."""


class ModelNotFound(EngineError):
    """A model name that leads to no model on this machine, and from nowhere else either."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__("model_not_found", f"model {name}: {reason}", "model")
        self.name = name
        self.reason = reason


class ModelNotUsable(EngineError):
    """A model directory whose files are missing, damaged or don't fit each other."""

    def __init__(self, directory: str, reason: str) -> None:
        super().__init__("model_not_usable", f"the model in {directory} can't be used: {reason}", "model")
        self.directory = directory
        self.reason = reason


class UnsupportedModel(EngineError):
    """A model whose configuration asks for what no program here does."""

    def __init__(self, field: str, value: object, supported: str) -> None:
        super().__init__("unsupported_model", f"{field} is {value!r}; supported: {supported}", "model")
        self.field = field
        self.value = value
        self.supported = supported


class NoChatTemplate(EngineError):
    """A model that comes without a chat template, so that `messages` can't become a prompt."""

    def __init__(self, directory: str) -> None:
        super().__init__(
            "no_chat_template", f"the model in {directory} has no chat template; send a prompt", "messages"
        )
        self.directory = directory


class ChatTemplateError(EngineError):
    """Messages that a chat template refuses or fails on."""

    def __init__(self, message: str) -> None:
        super().__init__("chat_template_error", message, "messages")


class InvalidOutputs(EngineError):
    """What is said to be a context's output so far can't be that."""

    def __init__(self, context_id: str, why: str) -> None:
        super().__init__("unreadable_context", f"{context_id}: its output so far can't be what it is: {why}")
