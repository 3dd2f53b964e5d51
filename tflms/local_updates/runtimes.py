"""The runtimes behind one trainer: how a batch reaches the chunks and how results come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tflms.local_updates.threads import ThreadsRuntime

class FusedRuntime:
    """All chunks in one graph on the caller's thread; Keras's own loop calls it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def compiled(self) -> None:
        """Take note that the trainer has new optimizers."""

    def train_function(self) -> Callable[[Any], Any] | None:
        """Return what ``fit`` calls per batch, or None for Keras's own function."""
        return None

    def step(self, inputs: Sequence[Any], labels: Any, weights: Any) -> None:
        """Train on one batch, while Keras traces."""
        self.trainer.fused_step(inputs, labels, weights)

    def drain(self) -> None:
        """Wait until every chunk has done every batch; nothing runs behind in one graph."""

    @contextmanager
    def session(self, name: str) -> Iterator[None]:
        """Surround a call of ``fit`` or ``evaluate``."""
        del name
        yield

    def fit(self, keras_fit: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run Keras's ``fit``."""
        return keras_fit(*args, **kwargs)

    def evaluate(self, keras_evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run Keras's ``evaluate``."""
        return keras_evaluate(*args, **kwargs)


def make_runtime(trainer: Any, name: str, *, form: str, sync_every: int) -> Any:
    """Return the runtime of that name."""
    if name == "threads":
        return ThreadsRuntime(trainer)
    del form, sync_every
    return FusedRuntime(trainer)
