"""What happens to each function that is traced under a config: rewritten, or left alone and why."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tflms.config import Config
from tflms.errors import GraphError
from tflms.graph import effects
from tflms.report import Report
from tflms.runtime import collect, hook, turns
from tflms.runtime import read as reading
from tflms.runtime.rewrite import rewrite

_log = logging.getLogger(__name__)
_UNSAVEABLE = (
    "this function was rewritten by tflms for training on one machine's devices and is not "
    "exported; export a function that was traced outside of tflms.enabled, for example "
    "tf.function(step.python_function)"
)
_LOOPS = ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


class Traced:
    """Follows the functions that are traced under one config, and keeps their reports.

    Attributes:
        config: the config.
        reports: one for each trace that held gradients, in order; most have been rewritten.
        notices: what was left alone, and why; one sentence each.
    """

    def __init__(self, config: Config, *, assumed_batch: int | None = None) -> None:
        """Follow functions.

        Args:
            config: how to rewrite them.
            assumed_batch: the batch size to go by where neither trace nor config knows one.
        """
        self.config = config
        self.reports: list[Report] = []
        self.notices: list[str] = []
        self.seen_batch: int | None = None
        self._assumed_batch = assumed_batch
        self._own_notes: list[tuple[str, ...]] = []
        self._owners: list[tuple[int, str]] = []
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()

    @property
    def report(self) -> Report:
        """The report of the trace that moves most bytes, with notes on all that was left alone."""
        if not self.reports:
            notes = tuple(self.notices) or ("nothing was traced",)
            return Report(str(self.config.strategy), self.config.to_dict(), 0, 0, 0, notes=notes)
        best = max(range(len(self.reports)), key=lambda i: (self.reports[i].moved_bytes, i))
        report = self.reports[best]
        report.notes = (*self._own_notes[best], *self.notices)
        return report

    # what the hook tells ------------------------------------------------------------------------

    def traced(self, trace: hook.Trace) -> None:
        """Rewrite a traced graph, or leave it alone and note why."""
        if trace.body and not trace.gradients:
            return
        _remember(self)
        self._known.add(trace.graph)
        captured = {id(t) for t in trace.graph.internal_captures}
        batch = _batch_of(t for t in trace.graph.inputs if id(t) not in captured)
        if batch is not None:
            self.seen_batch = batch
        if not trace.gradients:
            self._notice(f"{trace.name!r} was left alone: no gradients are taken in it")
        elif trace.compiled:
            self._warn(
                f"{trace.name!r} was left alone: XLA compiles it (jit_compile=True), and places "
                "everything on one device; pass jit_compile=False"
            )
        else:
            self._rewrite(trace)

    def reused(self, name: str, graph: Any) -> None:
        """Tell that a function runs as it was traced before."""
        if graph in self._known:
            return
        self._known.add(graph)
        _remember(self)
        text = (
            f"{name!r} was traced before and runs as it was then; call it for the first time under "
            "this config, or make the tf.function anew"
        )
        if any(effects.of(op.type).writes or op.type in _CALLS for op in graph.get_operations()):
            self._warn(text)
        else:
            self._notice(text)

    # --------------------------------------------------------------------------------------------

    def _rewrite(self, trace: hook.Trace) -> None:
        graph = trace.graph
        config, notes = self._sized(graph)
        losses, left_out = _losses(trace)
        targets = [t.op for t in graph.outputs if isinstance(t, tf.Tensor)]
        targets = list(dict.fromkeys([*targets, *graph.control_outputs]))
        try:
            with _without_collecting_garbage():
                report = rewrite(graph, config, loss=losses, fetches=targets)
        except GraphError as error:
            self._notice(f"{trace.name!r} was left alone: {error}")
            return
        report.subject = trace.name
        if left_out:
            notes.append(
                f"{left_out} of {len(trace.gradients)} gradient computations in {trace.name!r} "
                "were left alone: another one is built on their gradients, or they on its"
            )
        notes += _closed_bodies(graph)
        report.notes = (*report.notes, *notes)
        self._keep(report, trace)
        if report.inserted_names:
            graph.mark_as_unsaveable(_UNSAVEABLE)
            collect.mark(report, graph)
            collect.expect(report)
        elif not report.changed:
            report._verify = None

    def _keep(self, report: Report, trace: hook.Trace) -> None:
        """Keep a report, if need be in place of that of a trace that will never run.

        TensorFlow traces a function that creates variables twice and runs the second trace.
        """
        with self._lock:
            if trace.again and self._owners and self._owners[-1] == (trace.owner, trace.name):
                collect.forget([self.reports.pop()])
                self._own_notes.pop()
                self._owners.pop()
            self.reports.append(report)
            self._own_notes.append(report.notes)
            self._owners.append((trace.owner, trace.name))

    def _sized(self, graph: Any) -> tuple[Config, list[str]]:
        """Put the best known batch size into the config if the graph leaves it open."""
        known = self.config.batch_size or self.seen_batch or self._assumed_batch
        if self.config.batch_size is not None or known is None or not _is_open(graph):
            return self.config, []
        kind = "that of the batch before" if self.seen_batch else "an assumption"
        note = f"sizes are for a batch of {known} ({kind}); batch_size= in the config says better"
        return self.config.replace(batch_size=known), [note]

    def _notice(self, text: str) -> None:
        self._tell(text, logging.INFO)

    def _warn(self, text: str) -> None:
        self._tell(text, logging.WARNING)

    def _tell(self, text: str, level: int) -> None:
        with self._lock:
            if text not in self.notices:
                self.notices.append(text)
                _log.log(level, "%s", text)


@contextlib.contextmanager
def _without_collecting_garbage() -> Iterator[None]:
    """Keep the collector from walking through TensorFlow's objects again and again meanwhile.

    A rewrite makes many small objects and leaves no cycles behind; half its time went there.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _losses(trace: hook.Trace) -> tuple[list[Any], int]:
    """What was differentiated, and how many computations of gradients were left out."""
    targets = list({id(t): t for call in trace.gradients for t in call.targets}.values())
    if len(targets) == 1:
        return targets, 0
    read = reading.read(trace.graph)
    calls = [
        turns.Turn(
            tuple(v for t in call.targets if (v := read.value_id(t)) is not None),
            tuple(v for t in call.results if (v := read.value_id(t)) is not None),
        )
        for call in trace.gradients
    ]
    chosen, left_out = turns.choose(read.graph, calls)
    return [read.tensor(v) for v in chosen], left_out


def _closed_bodies(graph: Any) -> list[str]:
    """Notes on the operations whose bodies were not looked into."""
    loops = sum(op.type in _LOOPS for op in graph.get_operations())
    calls = sum(op.type in _CALLS for op in graph.get_operations())
    notes = []
    if loops:
        notes.append(f"the bodies of {loops} loops and branches were left alone")
    if calls:
        notes.append(
            f"{calls} calls of other functions were left closed: what they keep, they keep"
        )
    return notes


def _is_open(graph: Any) -> bool:
    return any(t.shape.rank and t.shape[0] is None for t in graph.inputs)


def _batch_of(tensors: Iterable[Any]) -> int | None:
    """The leading dimension of the first input with more than one."""
    for tensor in tensors:
        shape = getattr(tensor, "shape", None)
        if shape is not None and getattr(tensor, "dtype", None) != tf.resource:
            known = tf.TensorShape(shape)
            if known.rank and known.rank > 1 and known[0] is not None:
                return int(known[0])
    return None


def batch_of_arguments(args: Any, kwargs: Any) -> int | None:
    """Return the batch size of a call: the leading dimension of its first tensor of rank 2 up."""
    return _batch_of(tf.nest.flatten((args, kwargs)))


class _Last(threading.local):
    traced: Traced | None = None


_last = _Last()
_anywhere: list[Traced] = []  # the last one in any thread


def _remember(traced: Traced) -> None:
    _last.traced = traced
    _anywhere[:] = [traced]


def last_reports() -> tuple[Report, ...]:
    """Return the reports of what was traced last under a config.

    Of this thread, if it traced anything, otherwise of any; the first is the one that moves most
    bytes, and its notes say what was left alone.
    """
    traced = _last.traced or (_anywhere[0] if _anywhere else None)
    if traced is None:
        return ()
    first = traced.report
    return (first, *(report for report in traced.reports if report is not first))
