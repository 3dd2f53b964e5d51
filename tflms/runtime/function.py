"""``tflms.function`` and ``tflms.enabled``: functions that are rewritten when they are traced."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tflms.config import Config
from tflms.errors import ConfigError
from tflms.report import Report
from tflms.runtime import collect, hook
from tflms.runtime.placement import check_devices
from tflms.runtime.traced import Traced, batch_of_arguments, last_reports

__all__ = ["Function", "enabled", "function", "last_reports"]

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def enabled(config: Config | Mapping[str, Any] | None = None) -> Iterator[Traced]:
    """Rewrite every function that this thread traces inside the ``with`` block.

    Blocks may be nested; the innermost one counts. Functions that were traced before run as they
    were: a warning says so, and the report's notes.

    Args:
        config: a ``Config`` or a dict of its fields; ``{"strategy": "none"}`` rewrites nothing.

    Yields:
        what was traced so far: ``.report``, ``.reports``, ``.notices``.

    Raises:
        ConfigError: the config is wrong, or no device is called as it says.
    """
    checked = Config.of(config)
    check_devices(checked)
    with follow(Traced(checked)) as traced:
        yield traced


@contextlib.contextmanager
def follow(traced: Traced) -> Iterator[Traced]:
    """Let what is traced in this thread be rewritten, and look at what became of it afterwards."""
    try:
        with hook.listening(traced):
            yield traced
    except BaseException:
        collect.forget(traced.reports)
        raise
    if collect.waiting():
        collect.take()


def function(
    step_fn: Callable[..., Any] | None = None,
    config: Config | Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Make a function like ``tf.function`` whose traces are rewritten to need less memory.

    Can be called with a function, or used as a decorator, with or without arguments, on functions
    and methods.

    Args:
        step_fn: the Python function: a training step.
        config: a ``Config`` or a dict of its fields.
        options: all that ``tf.function`` takes: ``input_signature``, ``reduce_retracing``, ...

    Returns:
        a :class:`Function`, or a decorator if ``step_fn`` is not given.

    Raises:
        ConfigError: the config is wrong, or ``jit_compile=True`` is asked for.
    """
    checked = Config.of(config)
    check_devices(checked)
    if options.get("jit_compile"):
        raise ConfigError(
            "jit_compile=True: XLA cannot park values on the host, as it places everything on one "
            "device, and merges what is computed again with the first; pass jit_compile=False"
        )
    if step_fn is None:
        return functools.partial(function, config=checked, **options)
    return Function(tf.function(step_fn, **options), Traced(checked))


class Function:
    """A ``tf.function`` whose traces are rewritten; made by :func:`function`.

    Has what a ``tf.function`` has: ``get_concrete_function``, ``python_function``,
    ``input_signature``, ``experimental_get_tracing_count`` and so on.
    """

    def __init__(self, inner: Any, traced: Traced) -> None:
        """Wrap a ``tf.function`` that was not traced yet."""
        self._inner = inner
        self._traced = traced
        self._bound: weakref.WeakKeyDictionary[Any, Function] = weakref.WeakKeyDictionary()
        functools.update_wrapper(self, inner.python_function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; trace and rewrite it first where these arguments are new."""
        if tf.config.functions_run_eagerly():
            _log.warning(
                "%r runs eagerly (tf.config.run_functions_eagerly): nothing is traced, so nothing "
                "is rewritten",
                self.__name__,
            )
            return self._inner(*args, **kwargs)
        self._look_at(args, kwargs)
        with follow(self._traced):
            return self._inner(*args, **kwargs)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        """Return the rewritten trace for these arguments or specs, as ``tf.function`` does."""
        self._look_at(args, kwargs)
        with hook.listening(self._traced):
            return self._inner.get_concrete_function(*args, **kwargs)

    def _look_at(self, args: Any, kwargs: Any) -> None:
        batch = batch_of_arguments(args, kwargs)
        if batch is not None:
            self._traced.seen_batch = batch

    def report(self) -> Report:
        """Return what was done at the last traces: the report of the one that moves most bytes."""
        return self._traced.report

    @property
    def reports(self) -> tuple[Report, ...]:
        """One report for each trace that held gradients."""
        return tuple(self._traced.reports)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind to an instance, so that methods can be decorated; each instance has its traces."""
        if instance is None:
            return self
        if instance not in self._bound:
            bound = self._inner.__get__(instance, owner)
            self._bound[instance] = Function(bound, Traced(self._traced.config))
        return self._bound[instance]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __repr__(self) -> str:
        return f"<tflms.function {self.__name__} ({self._traced.config.strategy})>"
