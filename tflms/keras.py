"""Keras models that train rewritten: a callback for ``fit``, ``prepare`` for everything else."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import keras
import tensorflow as tf

from tflms.config import Config
from tflms.errors import ConfigError
from tflms.report import Report
from tflms.runtime.function import Function, follow, function
from tflms.runtime.placement import check_devices
from tflms.runtime.traced import Traced

__all__ = ["LargeModelSupport", "Prepared", "prepare"]

_log = logging.getLogger(__name__)
# Keras leaves a batch's size open where the last one is smaller; fit() takes 32 if not told.
_KERAS_BATCH = 32


class LargeModelSupport(keras.callbacks.Callback):
    """Trains a model by ``fit`` with less memory on the device, and with the same numbers.

    ``model.fit(..., callbacks=[tflms.keras.LargeModelSupport(config)])``. The training function is
    built anew and rewritten when ``fit`` begins; when it ends, the model is as it was. Validation,
    saving and loading know nothing of it. Where the examples are no multiple of the batch, Keras
    leaves its size open: give it as ``batch_size=`` in the config, or sizes are for 32.

    Attributes:
        report: what was done at the last trace; filled by the first step.
    """

    def __init__(self, config: Config | Mapping[str, Any] | None = None) -> None:
        """Check the config.

        Raises:
            ConfigError: the config is wrong, or no device is called as it says.
        """
        super().__init__()
        self._config = Config.of(config)
        check_devices(self._config)
        self._step: _Step | None = None

    def set_model(self, model: Any) -> None:
        """Be told of the model; a rewrite that an interrupted ``fit`` left in it is taken out."""
        super().set_model(model)
        left = getattr(model, "train_function", None)
        if isinstance(left, _Step):
            left.take_out(model)

    def on_train_begin(self, logs: Any = None) -> None:
        """Put the rewritten training function into the model.

        Raises:
            ConfigError: the model runs eagerly.
        """
        plain = self.model.train_function
        if self._step is None or not self._step.stands_for(plain, self.model):
            self._step = _Step(self.model, plain, Traced(self._config, assumed_batch=_KERAS_BATCH))
        self.model.train_function = self._step

    def on_train_end(self, logs: Any = None) -> None:
        """Give the model its own training function back."""
        if self._step is not None:
            self._step.take_out(self.model)

    @property
    def report(self) -> Report:
        """What was done to the training step, and what was left alone."""
        if self._step is None:
            return Traced(self._config).report
        return self._step.traced.report

    @property
    def reports(self) -> tuple[Report, ...]:
        """One report for each traced function that held gradients."""
        return () if self._step is None else tuple(self._step.traced.reports)


class _Step:
    """A training function of a model whose traces are rewritten, in place of the plain one."""

    def __init__(self, model: Any, plain: Any, traced: Traced) -> None:
        self.plain = plain
        self.traced = traced
        self._settings = _settings(model)
        self._function = _build(model, traced)

    def stands_for(self, plain: Any, model: Any) -> bool:
        """Whether the model would build the same function again."""
        return plain is self.plain and self._settings == _settings(model)

    def take_out(self, model: Any) -> None:
        """Give a model its plain function back, if this one is in its place."""
        if model.train_function is self:
            model.train_function = self.plain

    def __call__(self, iterator: Any) -> Any:
        """Run the step, or the steps, that Keras asks for."""
        with follow(self.traced):
            return self._function(iterator)


def _settings(model: Any) -> tuple[Any, ...]:
    return (
        weakref.ref(model),
        weakref.ref(model.optimizer) if model.optimizer is not None else None,
        model.steps_per_execution,
        model.run_eagerly,
    )


def _build(model: Any, traced: Traced) -> Callable[[Any], Any]:
    """Let Keras build a training function as it does, without XLA, and leave the model as it is.

    Raises:
        ConfigError: the model runs eagerly, or is not compiled.
    """
    if not getattr(model, "compiled", False):
        raise ConfigError(
            f"the model {model.name!r} is not compiled; call model.compile(..., "
            "jit_compile=False) first"
        )
    if model.run_eagerly or tf.config.functions_run_eagerly():
        raise ConfigError(
            f"the model {model.name!r} runs eagerly, so there is no graph to rewrite; compile it "
            "with run_eagerly=False (and do not call tf.config.run_functions_eagerly)"
        )
    before, compiles = model.train_function, bool(model.jit_compile)
    if compiles:
        text = (
            f"XLA was switched off for the training step of {model.name!r}: it places everything "
            "on one device and cannot park values on the host; compile(jit_compile=False) says so "
            'from the start (Keras\' own choice is "auto")'
        )
        _log.warning("%s", text)
        traced.notices.append(text)
        model.jit_compile = False
    try:
        model.make_train_function(force=True)
        return model.train_function
    finally:
        model.train_function = before
        if compiles:
            model.jit_compile = True


class Prepared:
    """A model whose training function is rewritten until :meth:`close`; made by :func:`prepare`.

    May be used as a context manager.
    """

    def __init__(self, model: Any, config: Config) -> None:
        """Take over how the model makes its training function."""
        self._model = model
        self._config = config
        self._traced = Traced(config, assumed_batch=_KERAS_BATCH)
        self._step: _Step | None = None
        self._functions: list[Function] = []
        _build(model, Traced(config))  # refuses what cannot be rewritten now, and not at step one
        _take_over(model, self._make_train_function)
        model.train_function = None

    def _make_train_function(self, force: bool = False) -> Any:
        """Stand in for ``model.make_train_function``; ``compile`` makes Keras call it again."""
        model = self._model
        if model.train_function is None or force:
            _give_back(model)
            try:
                self._step = _Step(model, None, self._traced)
            finally:
                _take_over(model, self._make_train_function)
            model.train_function = self._step
        return model.train_function

    def function(self, step_fn: Callable[..., Any], **options: Any) -> Function:
        """Return ``tflms.function(step_fn, config)`` for a training loop of your own."""
        made: Function = function(step_fn, self._config, **options)
        self._functions.append(made)
        return made

    @property
    def report(self) -> Report:
        """What was done; of several functions, to the one that moves most bytes."""
        reports = [self._traced.report, *(made.report() for made in self._functions)]
        return max(reports, key=lambda report: report.moved_bytes)

    def close(self) -> None:
        """Let the model make its own training functions again."""
        if "make_train_function" in vars(self._model):
            _give_back(self._model)
        if isinstance(self._model.train_function, _Step):
            self._model.train_function = None

    def __enter__(self) -> Prepared:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def prepare(model: Any, config: Config | Mapping[str, Any] | None = None) -> Prepared:
    """Rewrite a model's training step, for ``train_on_batch``, ``fit`` and loops of your own.

    Unlike the callback it stays, also when the model is compiled again, until ``close()``. A loop
    that does not go through Keras makes its step by ``prepared.function(step_fn)``.

    Args:
        model: a compiled Keras model.
        config: a ``Config`` or a dict of its fields; give it ``batch_size``.

    Raises:
        ConfigError: the config is wrong, the model is not compiled, or it runs eagerly.
    """
    checked = Config.of(config)
    check_devices(checked)
    if "make_train_function" in vars(model):
        raise ConfigError(
            f"the model {model.name!r} is prepared already; close() what prepare returned first"
        )
    return Prepared(model, checked)


def _take_over(model: Any, make: Callable[..., Any]) -> None:
    object.__setattr__(model, "make_train_function", make)  # Keras need not track it


def _give_back(model: Any) -> None:
    object.__delattr__(model, "make_train_function")
