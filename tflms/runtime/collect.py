"""Collects the graphs that TensorFlow makes of rewritten functions, to see that they survive."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from tensorflow.python.eager import context

from tflms.errors import TflmsError
from tflms.graph.names import is_inserted
from tflms.report import Report, Survival

_log = logging.getLogger(__name__)


class _Collection:
    """Reports that wait for the first run of their function."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: list[Report] = []


_collection = _Collection()


def expect(report: Report) -> None:
    """Look at the graphs of the functions that are run from now on, until the report's is seen."""
    with _collection.lock:
        if not _collection.waiting:
            context.context().enable_graph_collection()
        _collection.waiting.append(report)
    report._verify = lambda session_config: _answer(report)


def waiting() -> bool:
    """Return whether a rewritten function has not been seen running."""
    return bool(_collection.waiting)


def awaits(report: Report) -> bool:
    """Return whether a report's function has not been seen running."""
    return any(r is report for r in _collection.waiting)


def take() -> None:
    """Look at what was collected so far, and write into each report what is left of its rewrite."""
    with _collection.lock:
        if not _collection.waiting:
            return
        metadata = context.context().export_run_metadata()
        still = match(_collection.waiting, [] if metadata is None else metadata.function_graphs)
        _collection.waiting = still
        if not still:
            context.context().disable_graph_collection()


def forget(reports: Sequence[Report]) -> None:
    """Wait no longer for functions that will not run any more."""
    with _collection.lock:
        left = [r for r in _collection.waiting if all(r is not gone for gone in reports)]
        if _collection.waiting and not left:
            context.context().disable_graph_collection()
        _collection.waiting = left


def match(reports: Sequence[Report], function_graphs: Iterable[Any]) -> list[Report]:
    """Give each report the survival of its operations; return the reports that were not found.

    A function that was inlined has its caller's name before each node; two functions of the same
    structure differ in that, or in the graph that holds them.
    """
    graphs = [_inserted(graph) for graph in function_graphs]
    taken: set[tuple[int, str]] = set()  # a graph and the caller's name in it
    left: list[Report] = []
    for report in reports:
        names = report.inserted_names
        found = {
            (place, caller): group
            for place, present in enumerate(graphs)
            for caller, group in _by_caller(names, present).items()
            if (place, caller) not in taken
        }
        if not found:
            left.append(report)
            continue
        where, best = max(found.items(), key=lambda entry: len(entry[1]))
        taken.add(where)
        missing = tuple(name for name in names if name not in best)
        report.survival = Survival(len(names), len(names) - len(missing), missing)
        if missing:
            _log.warning(
                "TensorFlow's optimizers removed %d of %d operations that the rewrite of %r "
                "inserted; it saves less than was planned",
                len(missing), len(names), report.subject,
            )  # fmt: skip
    return left


def _inserted(graphs: Any) -> list[str]:
    """Names of all inserted operations in the partitions of one function."""
    found: list[str] = []
    for graph_def in graphs.partition_graphs:
        found += [node.name for node in graph_def.node]
        for function in graph_def.library.function:
            found += [f"{function.signature.name}:/{node.name}" for node in function.node_def]
    return [name for name in found if is_inserted(name)]


def _by_caller(names: Sequence[str], present: Sequence[str]) -> dict[str, set[str]]:
    """Which of a report's names are present, apart for each caller that they were inlined into."""
    wanted = set(names)
    groups: dict[str, set[str]] = {}
    for full in present:
        caller, rest = "", full
        while rest and rest not in wanted:
            head, _, rest = rest.partition("/")
            caller += head + "/"
        if rest:
            groups.setdefault(caller, set()).add(rest)
    return groups


def _answer(report: Report) -> Survival:
    if report.survival is None and not awaits(report):
        expect(report)
        context.context().clear_kernel_cache()  # what is in it was prepared unseen
    elif report.survival is None:
        take()
    if report.survival is None:
        raise TflmsError(
            f"the rewritten function {report.subject!r} has not been run yet; run it once, then "
            "ask what is left of the rewrite"
        )
    return report.survival
