"""Turns what was done to a graph into records of a report; checks that bytes can be promised."""

from __future__ import annotations

from tflms.config import Config
from tflms.errors import ConfigError
from tflms.graph.ir import Graph, OpId
from tflms.graph.order import Phases
from tflms.planning.cost import Costs, Sizes
from tflms.planning.simulate import Timeline
from tflms.report import Swap
from tflms.rewriting.engine import Engine
from tflms.strategies.swap import Swapped


def check_batch(graph: Graph, phases: Phases, config: Config) -> None:
    """Check that the batch is known, for bytes can be promised only then.

    Raises:
        ConfigError: a placeholder's first dimension is unknown, and ``batch_size`` is not set.
    """
    if config.batch_size is not None:
        return
    for op in graph.ops():
        if op.type != "Placeholder" or not phases.step[op.id]:
            continue
        value = op.outputs[0]
        shape = graph.value(value).shape
        if shape and shape[0] is None and phases.activation[value]:
            raise ConfigError(
                f"{op.name!r} has a batch of unknown size, so no peak can be predicted; set "
                "batch_size to the number of examples in a step"
            )


def swap(graph: Graph, swapped: Swapped, weights: Sizes) -> Swap:
    """Return the record of one value that is parked."""
    ins = [graph.op(w) for w, _ in swapped.groups]
    uses = [graph.op(use.op).name for _, group in swapped.groups for use in group]
    return Swap(
        value=graph.value_name(swapped.value),
        nbytes=None if swapped.value in weights.unknown else weights.nbytes[swapped.value],
        swap_out=graph.op(swapped.swap_out).name,
        swap_ins=tuple(op.name for op in ins),
        anchors=tuple(graph.op(op.controls[0]).name for op in ins),
        uses=tuple(dict.fromkeys(uses)),
        gone_level=swapped.gone,
        back_level=swapped.back,
        gates=_gates(graph, swapped.swap_out),
        joined=graph.op(swapped.swap_out).role == "swap_join",
    )


def _gates(graph: Graph, swap_out: OpId) -> tuple[str, ...]:
    """Names of the user's operations that wait for a copy out, by themselves or by their input."""
    found: list[OpId] = []
    for op in graph.control_users(swap_out):
        inserted = graph.op(op).role == "identity"
        found += graph.successors(op) if inserted else [op]
    return tuple(dict.fromkeys(graph.op(op).name for op in found if op < graph.original_ops))


def orders(engine: Engine) -> tuple[tuple[str, str], ...]:
    """Return what waits for what, as rule ``order`` was applied to the user's own operations."""
    graph = engine.graph
    pairs = (a.bindings for a, _ in engine.log if a.rule == "order")
    return tuple(
        (graph.op(pair["b"]).name, graph.op(pair["a"]).name)
        for pair in pairs
        if max(pair["a"], pair["b"]) < graph.original_ops
    )


def plain_seconds(graph: Graph, timeline: Timeline, costs: Costs) -> float:
    """Return how long a step would take that waits for no copy and computes nothing again."""
    clones = (op for op in graph.ops() if op.role == "clone" and op.origin is not None)
    again = sum(costs.seconds[op.origin] for op in clones if op.origin is not None)
    return timeline.seconds - timeline.stall_seconds - again
