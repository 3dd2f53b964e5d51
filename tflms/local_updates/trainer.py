"""Trains a split model by local updates behind Keras's own compile, fit, evaluate and predict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tflms.errors import ConfigError
from tflms.local_updates.assembly import build_stages, exits_of, named_results
from tflms.local_updates.batches import unpack_batch
from tflms.local_updates.evaluation import EXITS, ensemble, exit_model
from tflms.local_updates.failure import ChunkError
from tflms.local_updates.optimizers import (
    check_optimizer,
    copy_of,
    learning_rate,
    optimizers_for,
    set_learning_rate,
)
from tflms.local_updates.plan import SplitPlan
from tflms.local_updates.resuming import Resuming
from tflms.local_updates.runtimes import make_runtime
from tflms.local_updates.settings import check_plan, check_settings
from tflms.local_updates.splitting import split
from tflms.local_updates.stage import Exit, examples_in
from tflms.local_updates.sweep import Sweep
from tflms.local_updates.windows import windows_of


class LocalTrainer(Resuming, keras.Model):
    """A Keras model whose chunks train by their own losses, with no gradient across a cut.

    ``fit``, ``evaluate`` and ``predict`` are Keras's; the weights are those of the model that was
    split. Metrics are reported per exit: ``loss`` is the last one, ``loss_0`` the first chunk's.

    Args:
        model: the model that was split.
        plan: where it is cut; default: behind every block.
        method: ``"backprop"`` (exact, one loss), ``"greedy"`` (a loss behind every block: the plan
            is replaced by the finest one), ``"overlapping"`` (windows of chunks), ``"chunked"`` (a
            loss behind each chunk of the plan), ``"last"`` (only the last chunk trains).
        heads: name of the auxiliary heads (see ``heads.HEADS``), a function from the chunk's output
            shape to a Keras model, or a list with one of these per inner chunk.
        head_options: further arguments of ``heads.make_head`` (``rank``, ``hidden``,
            ``initializer``, ``table``).
        devices: TensorFlow device per chunk; the chunk's variables are moved there.
        runtime: ``"fused"`` (one graph, for memory), ``"threads"`` (one per chunk and device) or
            ``"processes"`` (one per chunk, see ``python -m tflms local-run``).
        queue_size: batches that may wait in front of a chunk.
        window: chunks in a window of ``"overlapping"`` (2).
        stride: chunks from one window to the next (1).
        form: of ``"overlapping"``: ``"cotangent"`` (no forward pass twice) or ``"duplicates"``
            (each window trains a copy, the copies' updates are averaged; fused only).
        sync_every: steps between two averages of the duplicates.
        ordered: put each chunk behind the last one's update; False only to show what it is for.
        timeout: seconds that a chunk waits for a peer before the run is given up.
        stop_on_nan: end the run with an error when a chunk's loss is no number.

    Raises:
        ConfigError: a setting is wrong.
        GraphError: the model cannot be cut.
    """

    def __init__(
        self,
        model: Any,
        plan: SplitPlan | None = None,
        *,
        method: str = "chunked",
        heads: Any = "auto",
        head_options: dict[str, Any] | None = None,
        devices: Sequence[str] | None = None,
        runtime: str = "fused",
        queue_size: int = 2,
        window: int | None = None,
        stride: int | None = None,
        form: str = "cotangent",
        sync_every: int = 1,
        ordered: bool = True,
        timeout: float = 300.0,
        stop_on_nan: bool = True,
    ) -> None:
        super().__init__(name=f"local_{model.name}")
        check_settings(
            method=method,
            runtime=runtime,
            form=form,
            sync_every=sync_every,
            heads=heads,
            queue_size=queue_size,
            timeout=timeout,
        )
        if plan is not None:
            check_plan(plan, model)
        if plan is None or method == "greedy":
            plan = split(model, batch_size=32 if plan is None else plan.batch_size)
        self.plan = plan
        self.method = method
        self.form = form
        self.queue_size = queue_size
        self.timeout = float(timeout)
        self.stop_on_nan = stop_on_nan
        self.ordered = ordered
        self.runtime_name = runtime
        self.windows = windows_of(method, chunks=len(plan.chunks), window=window, stride=stride)
        self.source = model
        self._stage_list = [
            build_stages(
                plan,
                self.windows,
                heads=heads,
                head_options=head_options or {},
                devices=devices,
                here=runtime != "processes",
            )
        ]
        self.exit_models = [exit_ for _, exit_ in exits_of(self.stages)]
        self._exits = "last"
        self._evaluating = False
        self._ensemble: Exit | None = None
        self.batches_done = 0
        self._to_skip = 0
        self.resumed = False
        self.train_function: Any = None
        self._runtime = make_runtime(self, runtime, form=form, sync_every=sync_every)
        self.built = True

    @property
    def stages(self) -> list[Any]:
        """The chunks at work, in order."""
        return list(self._stage_list[0])

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Return the whole model's output."""
        return self.source(inputs, training=training)

    # -- compile -------------------------------------------------------------------------------

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        metrics: Sequence[Any] | None = None,
        weighted_metrics: Sequence[Any] | None = None,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: bool | str = "auto",
    ) -> None:
        """Set optimizer(s), loss and metrics; each chunk gets its own optimizer.

        Args:
            optimizer: as in Keras (copied for each chunk), or a list with one per chunk.
            loss: the task loss; every exit has it.
            metrics: metrics of every exit.
            weighted_metrics: metrics that see the sample weights.
            run_eagerly: run the fused step without a graph.
            steps_per_execution: batches per call, in the fused runtime.
            jit_compile: XLA undoes the order between chunks, so it is refused for several.

        Raises:
            ConfigError: a setting does not go with several chunks.
        """
        count = len(self.stages)
        if jit_compile is True and count > 1:
            raise ConfigError(
                "jit_compile=True: XLA ignores the order between chunks and keeps all activations; "
                "leave it out"
            )
        if steps_per_execution != 1 and self.runtime_name != "fused":
            raise ConfigError("steps_per_execution= belongs to runtime='fused'; use 1")
        optimizers = optimizers_for(optimizer, chunks=count)
        for stage, own in zip(self.stages, optimizers, strict=True):
            check_optimizer(self, own)
            stage.optimizer = own
            if stage.exit is not None:
                last = stage is self.stages[-1]
                stage.exit.compile(
                    optimizer=own,
                    loss=loss,
                    metrics=metrics if last else _copies(metrics),
                    weighted_metrics=weighted_metrics if last else _copies(weighted_metrics),
                    jit_compile=False,
                )
                stage.optimizer = stage.exit.optimizer
        self._ensemble = Exit(None, name="ensemble")
        self._ensemble.compile(optimizer=None, loss=loss, metrics=_copies(metrics))
        super().compile(
            optimizer=self.stages[-1].optimizer,
            run_eagerly=run_eagerly,
            steps_per_execution=steps_per_execution,
            jit_compile=jit_compile if count == 1 else False,
        )
        for stage in self.stages:
            if stage.trainable:
                with stage.on_device():
                    stage.optimizer.build(stage.trainable)
        self._runtime.compiled()

    # -- metrics -------------------------------------------------------------------------------

    @property
    def metrics(self) -> list[Any]:
        """The metrics of all exits, those of the last one first."""
        found = [metric for _, exit_ in exits_of(self.stages) for metric in exit_.metrics]
        if self._ensemble is not None:
            found += self._ensemble.metrics
        return found

    def reset_metrics(self) -> None:
        """Reset the metrics of all exits, wherever they live."""
        if self._to_skip and not self._evaluating:
            return  # the epoch goes on where the checkpoint left it
        super().reset_metrics()
        self._runtime.reset()

    def run_digest(self) -> str:
        """Return a hash of plan, method and windows: processes of one run have the same."""
        return f"{self.plan.digest()}-{self.method}-{[(w.first, w.last) for w in self.windows]}"

    def get_metrics_result(self) -> dict[str, Any]:
        """Return the results per exit; asynchronous chunks are waited for."""
        if self._evaluating:
            return named_results(self.stages, mode=self._exits, ensemble=self._ensemble)
        self._runtime.drain()
        return self._runtime.results()

    def _flatten_metrics_in_order(self, logs: dict[str, Any]) -> Any:
        """Return results as Keras's calls do without ``return_dict``: the last exit's come first.

        Keras would go by the names of metrics, and each exit has one called ``loss``.
        """
        names = named_results(self.stages, mode="all", ensemble=None)
        values = [logs[name] for name in names if name in logs]
        return values[0] if len(values) == 1 else values

    # -- steps of the fused runtime ------------------------------------------------------------

    def train_step(self, data: Any) -> dict[str, Any]:
        """Train all chunks on one batch, in order, within one graph."""
        self._runtime.step(*unpack_batch(data))
        return named_results(self.stages, mode="all", ensemble=None)

    def fused_step(self, inputs: Sequence[Any], labels: Any, weights: Any) -> list[Any]:
        """Train all chunks on one batch and return each chunk's ``step.Done``."""
        return Sweep(self.stages, ordered=self.ordered).run(inputs, labels, weights)

    def test_step(self, data: Any) -> dict[str, Any]:
        """Evaluate one batch at the exits that ``evaluate`` asks for."""
        tensors, y, weights = unpack_batch(data)
        predictions, penalties = [], []
        for stage in self.stages:
            tensors = stage.forward(tensors, training=False)
            penalties += [tf.reduce_sum(penalty) for penalty in stage.block.losses]
            exit_ = stage.exit
            if exit_ is None or (self._exits == "last" and stage is not self.stages[-1]):
                continue
            predictions.append(exit_(stage.main(tensors), training=False))
            if self._exits != "ensemble":
                _score(exit_, predictions[-1], penalties, y, weights)
        if self._exits == "ensemble":
            assert self._ensemble is not None
            _score(self._ensemble, ensemble(predictions), [], y, weights)
        return named_results(self.stages, mode=self._exits, ensemble=self._ensemble)

    def make_train_function(self, force: bool = False) -> None:
        """Make what ``fit`` calls for each batch; the runtime decides what that is."""
        self._exits = "all"
        if self.train_function is not None and not force:
            return
        custom = self._runtime.train_function()
        if custom is None:
            super().make_train_function(force=force)
            custom = self.train_function
        self.train_function = self._checked(custom)

    def _checked(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the train function with a look at the losses after each batch."""

        def call(iterator: Any) -> Any:
            if self._to_skip:
                return self._skip(iterator)
            set_learning_rate(self._runtime.optimizers(), learning_rate(self.optimizer))
            self.resumed = False
            logs = function(iterator)
            if self.stop_on_nan and self.runtime_name == "fused":
                self._look_for_nan(logs)
            self.batches_done += self.steps_per_execution
            return logs

        return call

    def _look_for_nan(self, logs: dict[str, Any]) -> None:
        for stage, _ in exits_of(self.stages):
            name = "loss" if stage is self.stages[-1] else f"loss_{stage.index}"
            if not math.isfinite(float(logs[name])):
                raise ChunkError(
                    "its loss is no number (NaN or infinite); lower the learning rate, or pass "
                    "stop_on_nan=False to go on",
                    chunk=stage.index,
                    batch=self.batches_done,
                )

    # -- what users call -----------------------------------------------------------------------

    def fit(self, *args: Any, resume: str | Path | None = None, **kwargs: Any) -> Any:
        """Train as ``keras.Model.fit`` does, with the same arguments.

        Args:
            *args: as in Keras.
            resume: folder of a checkpoint (see ``LocalCheckpoint``) to go on from, within the epoch
                too: give the same data in the same order (no shuffling by ``fit``).
            **kwargs: as in Keras.
        """
        self._assert_compile_called("fit")
        self.batches_done, self._to_skip, self.resumed = 0, 0, False
        if resume is not None:
            kwargs["initial_epoch"] = self._resume(resume, args, kwargs)
        with self._runtime.session("fit"):
            return self._runtime.fit(super().fit, *args, **kwargs)

    def evaluate(self, *args: Any, exits: str = "last", **kwargs: Any) -> Any:
        """Evaluate as ``keras.Model.evaluate`` does.

        Args:
            *args: as in Keras.
            exits: ``"last"`` the model's output; ``"all"`` every exit (``loss_0``, ...);
                ``"ensemble"`` the mean of all exits, deeper ones weighted twice the one before.
            **kwargs: as in Keras.
        """
        if exits not in EXITS:
            raise ConfigError(f"exits={exits!r} is unknown; use one of {', '.join(EXITS)}")
        before = self._exits
        if self._exits != exits:
            self._exits = exits
            self.test_function = None
        self._evaluating = True
        try:
            with self._runtime.session("evaluate"):
                return self._runtime.evaluate(super().evaluate, *args, **kwargs)
        finally:
            self._evaluating = False
            if before != exits:
                self._exits = before
                self.test_function = None

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict with the whole model, as ``keras.Model.predict`` does."""
        with self._runtime.session("predict"):
            return super().predict(*args, **kwargs)

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Train on one batch as ``keras.Model.train_on_batch`` does, in the fused runtime."""
        if self.runtime_name != "fused":
            raise ConfigError(
                f"train_on_batch() waits for each batch, runtime={self.runtime_name!r} has many on "
                "the way; use fit()"
            )
        return super().train_on_batch(*args, **kwargs)

    def export(self, exit: int | None = None, **kwargs: Any) -> Any:
        """Return a plain Keras model that shares the trained weights.

        Args:
            exit: the chunk whose head ends the model; default: the original model without heads.
            **kwargs: none are known; named so that a Keras-style call gives a clear error.

        Raises:
            ConfigError: that chunk has no exit.
        """
        if kwargs:
            raise ConfigError(f"export() knows exit= alone, not {', '.join(sorted(kwargs))}")
        return exit_model(self, exit)


def _copies(metrics: Sequence[Any] | None) -> list[Any] | None:
    """Return metrics for another exit: objects with state are copied, names are kept."""
    if metrics is None:
        return None
    listed = metrics if isinstance(metrics, (list, tuple)) else [metrics]
    return [copy_of(m) if isinstance(m, keras.metrics.Metric) else m for m in listed]


def _score(exit_: Exit, predictions: Any, penalties: list[Any], labels: Any, weights: Any) -> None:
    loss = exit_.compute_loss(
        x=None, y=labels, y_pred=predictions, sample_weight=weights, training=False
    )
    total = tf.add_n([loss, *penalties]) if penalties else loss
    exit_.track_loss(total, examples=examples_in(predictions))
    exit_.compute_metrics(None, labels, predictions, sample_weight=weights)
