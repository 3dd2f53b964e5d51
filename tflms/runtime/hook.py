"""The one module that knows how TensorFlow traces functions: who listens is told of every trace.

TensorFlow passes each ``FuncGraph``, those of loop bodies and branches too, through a list of
transforms before it becomes a function of the runtime. Two more places are watched while somebody
listens: the look-up of a trace (was it traced now, or before?) and the taking of gradients (of
which tensors?). All of it is
looked for when this module is imported, and taken away again when nobody listens any more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from tflms.errors import HandBackError


@dataclass(frozen=True, slots=True)
class GradientCall:
    """One call that took gradients while a graph was traced.

    Attributes:
        targets: the tensors that were differentiated, of the traced graph.
        results: the gradients that came out, of the traced graph.
    """

    targets: tuple[Any, ...]
    results: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """What is known of a function that was traced just now.

    Attributes:
        name: of the Python function, and of the loop body or branch in it.
        graph: its ``FuncGraph``, complete, not yet a function of the runtime.
        body: whether it is the body of a loop or branch in the function.
        compiled: whether XLA will compile it, by itself or as a part of its caller.
        gradients: the calls that took gradients in it.
        owner: tells the functions apart.
        again: whether this is the second trace of a function whose first one created variables,
            and will never run.
    """

    name: str
    graph: Any
    body: bool
    compiled: bool
    gradients: tuple[GradientCall, ...]
    owner: int = 0
    again: bool = False


class Listener(Protocol):
    """Who wants to know of traces in a thread."""

    def traced(self, trace: Trace) -> None:
        """Be told of a graph that may still be edited; an error here ends the user's call."""

    def reused(self, name: str, graph: Any) -> None:
        """Be told that a function was called whose trace exists already."""


@dataclass(slots=True)
class _Lookup:
    """A call that looks for its trace."""

    name: str
    compiled: bool
    owner: int
    again: bool
    traced: bool = False


class _Thread(threading.local):
    """What one thread is doing; each thread sees its own (which slots would not give it)."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.lookups: list[_Lookup] = []
        self.gradients: dict[Any, list[GradientCall]] = {}


_thread = _Thread()
_lock = threading.Lock()
_listening = 0  # listeners in all threads


def current() -> Listener | None:
    """Return who listens to this thread; of several, the last to come."""
    return _thread.listeners[-1] if _thread.listeners else None


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let a listener know of every trace in this thread."""
    _count(+1)
    _thread.listeners.append(listener)
    try:
        yield
    finally:
        _thread.listeners.pop()
        _count(-1)


def _count(change: int) -> None:
    global _listening
    with _lock:
        before, _listening = _listening, _listening + change
        if not before:
            _places.install()
        elif not _listening:
            _places.remove()


class _Places:
    """The places in TensorFlow that are watched."""

    def __init__(self) -> None:
        try:
            from tensorflow.python.eager import imperative_grad
            from tensorflow.python.eager.polymorphic_function import (
                attributes,
                tracing_compilation,
                transform,
            )
            from tensorflow.python.framework import func_graph
            from tensorflow.python.ops import gradients_util

            self.transforms: list[Any] = transform.FUNC_GRAPH_TRANSFORMS
            self.compiled_attribute = attributes.XLA_COMPILE
            self.again = tracing_compilation.ScopeType.NO_VARIABLE_CREATION
            self.function_graph = func_graph.FuncGraph  # bodies are of types derived from it
            apply = transform.apply_func_graph_transforms
            self.patches: list[tuple[Any, str, Callable[..., Any]]] = [
                (tracing_compilation, "_maybe_define_function", _watch_lookup),
                (imperative_grad, "imperative_grad", _watch_gradients),
                (gradients_util, "_GradientsHelper", _watch_gradients),
            ]
            self.originals = [getattr(module, name) for module, name, _ in self.patches]
            self._check(apply, tracing_compilation)
        except (ImportError, AttributeError, TypeError, LookupError) as error:
            raise HandBackError(
                f"TensorFlow {tf.__version__} traces functions in another way than this package "
                f"knows ({error}); tflms.function, tflms.enabled and tflms.keras need TensorFlow "
                "2.21, tflms.rewrite on a tf.Graph works without"
            ) from error

    def _check(self, apply: Callable[[Any], None], tracing: Any) -> None:
        """See that transforms are called, and that tracing calls them; no device is created."""
        seen: list[Any] = []
        probe = self.function_graph("tflms_probe")
        self.transforms.append(seen.append)
        try:
            apply(probe)
        finally:
            self.transforms.remove(seen.append)
        if seen != [probe]:
            raise LookupError("function-graph transforms are not called")
        if apply.__name__ not in tracing._create_concrete_function.__code__.co_names:
            raise LookupError("tracing does not call the function-graph transforms")

    def install(self) -> None:
        self.transforms.append(_on_graph)
        for (module, name, wrap), original in zip(self.patches, self.originals, strict=True):
            setattr(module, name, wrap(original))

    def remove(self) -> None:
        self.transforms.remove(_on_graph)
        for (module, name, _), original in zip(self.patches, self.originals, strict=True):
            setattr(module, name, original)


def _on_graph(graph: Any) -> None:
    listener = current()
    if listener is None:
        return
    name, lookups = str(graph.name), _thread.lookups
    body = type(graph) is not _places.function_graph
    if lookups and not body:
        lookups[-1].traced = True
        name = lookups[-1].name
    listener.traced(
        Trace(
            name=name,
            graph=graph,
            body=body,
            compiled=any(lookup.compiled for lookup in lookups),
            gradients=tuple(_thread.gradients.pop(graph, ())),
            owner=lookups[-1].owner if lookups else 0,
            again=bool(lookups) and lookups[-1].again,
        )
    )


def _watch_lookup(original: Callable[..., Any]) -> Callable[..., Any]:
    def look_up(args: Any, kwargs: Any, tracing_options: Any) -> Any:
        listener = current()
        if listener is None:
            return original(args, kwargs, tracing_options)
        attributes = tracing_options.attributes or {}
        lookup = _Lookup(
            str(tracing_options.name),
            compiled=bool(attributes.get(_places.compiled_attribute)),
            owner=id(tracing_options.function_cache),
            again=tracing_options.scope_type == _places.again,
        )
        _thread.lookups.append(lookup)
        try:
            concrete = original(args, kwargs, tracing_options)
            if not lookup.traced:
                listener.reused(lookup.name, concrete.graph)
        finally:
            _thread.lookups.pop()
            if not _thread.lookups:
                _thread.gradients.clear()
        return concrete

    return look_up


def _watch_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    def take_gradients(*args: Any, **kwargs: Any) -> Any:
        results = original(*args, **kwargs)
        if current() is None or not _thread.lookups:
            return results
        # A tape comes before the targets of imperative_grad; tf.gradients starts with its targets.
        from_tape = original.__name__ == "imperative_grad"
        targets = kwargs.get("target" if from_tape else "ys")
        if targets is None and len(args) > from_tape:
            targets = args[int(from_tape)]
        # Gradient functions of calls and loops are built in a graph apart from their targets.
        graph = tf.compat.v1.get_default_graph()
        inside = tuple(t for t in tf.nest.flatten(targets) if _in_graph(t, graph))
        if inside:
            made = tf.nest.flatten(results, expand_composites=True)
            call = GradientCall(inside, tuple(g for g in made if _in_graph(g, graph)))
            _thread.gradients.setdefault(graph, []).append(call)
        return results

    return take_gradients


def _in_graph(tensor: Any, graph: Any) -> bool:
    return tf.is_symbolic_tensor(tensor) and tensor.graph is graph


_places = _Places()
