"""The kinds of error that the package raises: bad input at the border, or a bug of our own."""

from __future__ import annotations

from typing import Any


class TflmsError(Exception):
    """Root of every error that the package raises on purpose."""


class ConfigError(TflmsError, ValueError):
    """A setting is unknown, of the wrong type, or out of range."""


class GraphError(TflmsError, ValueError):
    """A graph cannot be read, or lacks what the call needs (a loss, gradients, a device)."""


class RuleError(TflmsError, ValueError):
    """A rule file is malformed, or a rule is applied with bindings that do not fit it."""


class InvariantError(TflmsError, RuntimeError):
    """A graph breaks an invariant of the IR, or a rewrite broke what its rule ensures: a bug."""


class HandBackError(TflmsError, RuntimeError):
    """The rewritten graph cannot be handed back to TensorFlow; the user's graph is unchanged."""


class EmulatorError(TflmsError, RuntimeError):
    """The emulated accelerator cannot be built, loaded or used."""


class InfeasibleError(TflmsError, ValueError):
    """No plan fits in the memory limit.

    Attributes:
        minimum_bytes: the smallest limit that can be met, or None where it is not known.
        details: further facts for programs (for example the op and its operands).
    """

    def __init__(self, message: str, *, minimum_bytes: int | None = None, **details: Any) -> None:
        super().__init__(message)
        self.minimum_bytes = minimum_bytes
        self.details = details
