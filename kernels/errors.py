"""Errors of the arithmetic: weights that don't fit a program, logits that no token can be drawn from."""

from __future__ import annotations


class KernelError(Exception):
    """Base of all: a stable `code`, a message with the values in it, and the parameter at fault where one is."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class WeightMismatch(KernelError):
    """A weight of the program that the given tensors lack, or have in another shape."""

    def __init__(self, name: str, expected: tuple[int, ...], found: tuple[int, ...] | None) -> None:
        what = "is missing" if found is None else f"has shape {list(found)}"
        super().__init__("weight_mismatch", f"weight {name} {what}; the program wants {list(expected)}", name)
        self.name = name
        self.expected = expected
        self.found = found


class InvalidLogits(KernelError):
    """A row of logits that has no largest finite value: it holds NaN or +inf."""

    def __init__(self, row: int, value: float) -> None:
        super().__init__("invalid_logits", f"row {row} of the logits holds {value}")
        self.row = row
        self.value = value


class NoCandidates(KernelError):
    """A row in which every token is banned or at -inf."""

    def __init__(self, row: int) -> None:
        super().__init__("no_candidates", f"row {row} of the logits leaves no token to draw")
        self.row = row


class BackendUnavailable(KernelError):
    """A backend that can't run here, or can't run this program."""

    def __init__(self, reason: str) -> None:
        super().__init__("backend_unavailable", reason)
