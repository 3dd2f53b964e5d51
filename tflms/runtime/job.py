"""A graph on its way through one call: read, checked, its phases found, simulated as it is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tensorflow.python.framework.func_graph import FuncGraph

from tflms.config import Config
from tflms.errors import GraphError, HandBackError
from tflms.graph import order
from tflms.graph.ir import Graph, OpId, ValueId
from tflms.graph.order import Phases
from tflms.planning import cost, simulate
from tflms.planning.plan import Plan
from tflms.planning.simulate import Timeline
from tflms.runtime import details
from tflms.runtime import read as reading
from tflms.runtime.placement import check_devices


@dataclass(slots=True)
class Job:
    """A graph on its way through one call."""

    read: reading.ReadGraph
    config: Config
    phases: Phases
    before: Timeline
    started: float
    loss: Sequence[ValueId] = ()
    targets: Sequence[OpId] = ()
    _weighed: tuple[int, cost.Sizes] | None = None
    _costs: cost.Costs | None = None

    @property
    def graph(self) -> Graph:
        """The IR."""
        return self.read.graph

    def weights(self) -> cost.Sizes:
        """What the values of the IR weigh as it is now."""
        if self._weighed is None or self._weighed[0] != self.graph.version:
            config = self.config
            self._weighed = (
                self.graph.version,
                cost.sizes(self.graph, device=config.device, batch_size=config.batch_size),
            )
        return self._weighed[1]

    def within(self) -> set[OpId]:
        """Operations that the training step runs, inserted ones among them."""
        step = {op for op in range(len(self.phases.step)) if self.phases.step[op]}
        step -= order.replaced(self.graph)
        return {
            op.id for op in self.graph.ops() if op.id in step or op.id >= self.graph.original_ops
        }


def start(
    graph: Any,
    config: Config,
    *,
    loss: Any = None,
    fetches: Iterable[Any] | Any = (),
    plan: Plan | None = None,
) -> Job:
    """Read a graph, check the call's arguments, find the phases, and simulate it as it is."""
    started = time.perf_counter()
    read = reading.read(graph)
    details.note(read)
    if read.tf_graph.finalized:
        raise HandBackError(
            "the graph is finalized and cannot be edited; rewrite it before MonitoredSession, "
            "Supervisor or graph.finalize() close it"
        )
    check_devices(config)
    if isinstance(fetches, str) or not isinstance(fetches, Iterable):
        fetches = [fetches]
    if plan is None:
        targets = reading.resolve(read, fetches)
        given = loss if isinstance(loss, list | tuple) else [] if loss is None else [loss]
        losses = [_loss_value(read, one) for one in given]
    else:
        plan.check(read.graph)
        targets, losses = [OpId(t) for t in plan.targets], [ValueId(v) for v in plan.loss]
    phases = order.phases(
        read.graph,
        loss=losses,
        targets=targets,
        whole=isinstance(graph, FuncGraph),
    )
    within = {op.id for op in read.graph.ops() if phases.step[op.id]}
    weights = cost.sizes(read.graph, device=config.device, batch_size=config.batch_size)
    before = simulate.simulate(read.graph, weights, within)
    return Job(read, config, phases, before, started, losses, targets)


def _loss_value(read: reading.ReadGraph, loss: Any) -> ValueId:
    reading.resolve(read, [loss])
    element = read.tf_graph.as_graph_element(loss) if isinstance(loss, str) else loss
    found = read.value_id(element) if hasattr(element, "value_index") else None
    if found is None:
        raise GraphError(f"loss= is {loss!r}; pass the tensor that the gradients were taken of")
    return found
