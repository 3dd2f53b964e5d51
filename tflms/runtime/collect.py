"""Collects the graphs that TensorFlow makes of rewritten functions, to see that they survive."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager import context

from tflms.errors import TflmsError
from tflms.report import Report, Survival

_log = logging.getLogger(__name__)
_MARK = (
    "_tflms_report"  # a private attribute, which TensorFlow carries along: whose operation it is
)


class _Collection:
    """Reports that wait for the first run of their function."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: list[Report] = []


_collection = _Collection()


def mark(report: Report, graph: Any) -> None:
    """Mark what a rewrite inserted, before the graph becomes a function."""
    value = attr_value_pb2.AttrValue(i=id(report))
    for name in report.inserted_names:
        graph.get_operation_by_name(name)._set_attr(_MARK, value)


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

    A function that was inlined has its caller's name before each node; where it was inlined more
    than once, an operation counts as missing if one of the calls lacks it.
    """
    present: dict[int, list[str]] = {}
    for graphs in function_graphs:
        for owner, node in _nodes(graphs):
            if _MARK in node.attr:
                present.setdefault(node.attr[_MARK].i, []).append(owner + node.name)
    left: list[Report] = []
    for report in reports:
        names = report.inserted_names
        calls = _by_caller(names, present.get(id(report), ()))
        if not calls:
            left.append(report)
            continue
        missing = tuple(n for n in names if not all(n in found for found in calls.values()))
        report.survival = Survival(len(names), len(names) - len(missing), missing)
        if missing:
            _log.warning(
                "TensorFlow's optimizers removed %d of %d operations that the rewrite of %r "
                "inserted; it saves less than was planned",
                len(missing), len(names), report.subject,
            )  # fmt: skip
    return left


def _nodes(graphs: Any) -> Iterator[tuple[str, Any]]:
    """All nodes in the partitions of one function, those of functions that were not inlined too."""
    for graph_def in graphs.partition_graphs:
        yield from (("", node) for node in graph_def.node)
        for function in graph_def.library.function:
            yield from ((f"{function.signature.name}:/", node) for node in function.node_def)


def _by_caller(names: Sequence[str], present: Sequence[str]) -> dict[str, set[str]]:
    """Return which of a report's names are present, apart for each call that was inlined."""
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
