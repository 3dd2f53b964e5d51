"""The fused runtime: all chunks in one graph, called by Keras's own loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tflms.local_updates.assembly import named_results
from tflms.local_updates.checkpoint import save_stage


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

    def optimizers(self) -> list[Any]:
        """Return the optimizers whose learning rate follows the trainer's."""
        return [stage.optimizer for stage in self.trainer.stages[:-1]]

    def save(self, path: str, *, batch: int, done: Callable[[], None]) -> None:
        """Save all chunks, then call ``done``."""
        for stage in self.trainer.stages:
            save_stage(stage, path, facts={"batch": batch})
        done()

    def reset(self) -> None:
        """Metrics are in this process; Keras has reset them."""

    def drain(self) -> None:
        """Wait until every chunk has done every batch; nothing runs behind in one graph."""

    @contextmanager
    def session(self, name: str) -> Iterator[None]:
        """Surround a call of ``fit`` or ``evaluate``."""
        del name
        yield

    def live(self) -> dict[str, Any]:
        """Return the metrics to show while batches are passed over."""
        return self.results()

    def results(self) -> dict[str, Any]:
        """Return every exit's metrics."""
        return named_results(self.trainer.stages, mode="all", ensemble=None)

    def fit(self, keras_fit: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run Keras's ``fit``."""
        return keras_fit(*args, **kwargs)

    def evaluate(self, keras_evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run Keras's ``evaluate``."""
        return keras_evaluate(*args, **kwargs)
