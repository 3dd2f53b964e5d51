"""One call in order: read, simulate, rewrite, verify, erase, simulate, hand back, report."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensorflow.python.framework.func_graph import FuncGraph

from tflms.checkpointing import strategy as checkpointing
from tflms.config import CHECKPOINTING, Config
from tflms.errors import ConfigError, GraphError, HandBackError, InfeasibleError
from tflms.graph import effects, erase, order
from tflms.graph.ir import Graph, OpId, ValueId
from tflms.graph.names import is_inserted
from tflms.graph.order import Phases
from tflms.graph.verify import verify
from tflms.planning import cost, packing, simulate
from tflms.planning import plan as planning
from tflms.planning.plan import Plan
from tflms.planning.simulate import Timeline
from tflms.report import Recompute, Report, Swap
from tflms.rewriting.engine import Engine
from tflms.runtime import costing, details, measure, records, survival, write
from tflms.runtime import read as reading
from tflms.runtime.facts import Facts
from tflms.runtime.placement import check_devices, default_kind
from tflms.strategies import auto as automatic
from tflms.strategies import shapes, siblings, waiting
from tflms.strategies import swap as swapping

_log = logging.getLogger(__name__)


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
        return {
            op.id for op in self.graph.ops() if op.id in step or op.id >= self.graph.original_ops
        }


def rewrite(
    graph: Any,
    config: Config | Mapping[str, Any] | None = None,
    *,
    loss: Any = None,
    fetches: Iterable[Any] | Any = (),
    plan: Plan | None = None,
    keep: bool = True,
) -> Report:
    """Rewrite a ``tf.Graph`` in place so that its training step needs less memory on the device.

    All handles, names, collections, devices and colocations of the graph stay as they are. On any
    error the graph is unchanged.

    Args:
        graph: the training graph, not yet run by a session that is still open.
        config: a ``Config`` or a dict of its fields.
        loss: the tensor, or tensors, that the gradients were taken of; None finds the turn from
            forward to backward by the bytes that are alive.
        fetches: what the training loop runs (train op, loss and so on): tensors, operations or
            names; empty takes what overwrites variables. Gradients that are fetched but not
            named here may be made to wait for updates, and run them.
        plan: of ``tflms.plan`` for this graph; it brings its own config, loss and fetches.
        keep: protect what is inserted from Grappler; False is for showing what happens otherwise.

    Returns:
        what was done, what was refused and why, and predictions of the peak before and after.

    Raises:
        ConfigError: the config is wrong.
        GraphError: the graph is empty, the loss or a fetch is not in it, or it has no gradients.
        HandBackError: the graph is finalized, or an open session has run it already.
    """
    if plan is not None:
        if config is not None or loss is not None:
            raise ConfigError("a plan brings its own config and loss; pass plan= alone")
        job = start(graph, Config.from_dict(plan.config), plan=plan)
        proposal = _replayed(job, plan)
    else:
        job = start(graph, Config.of(config), loss=loss, fetches=fetches)
        proposal = propose(job)
    if isinstance(proposal, str):
        return _report(job, (), job.before, 0, (), (proposal,))
    return _finish(job, proposal, keep)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A rewrite that was done on the IR alone."""

    engine: Engine
    swapped: list[swapping.Swapped]
    outcome: automatic.Outcome | None = None
    checkpointed: checkpointing.Checkpointed | None = None


def propose(job: Job) -> Proposal | str:
    """Rewrite the IR, or say why nothing is to be done."""
    config = job.config
    if config.strategy == "none" or config.n_tensors == 0:
        why = "strategy is 'none'" if config.strategy == "none" else "n_tensors is 0"
        return f"nothing was changed: {why}"
    if found := next((o.name for o in job.graph.ops() if is_inserted(o.name)), None):
        raise GraphError(
            f"this graph is rewritten already (it holds {found!r}); build it anew to rewrite it "
            "with another config"
        )
    if config.strategy == "auto":
        return _auto(job)
    if config.strategy in CHECKPOINTING:
        return _checkpointed(job)
    pairs = siblings.pairs(job.graph, job.phases)
    agreed = order.with_edges(job.graph, job.phases.order, pairs)
    if agreed is None:
        pairs = []
    else:  # one order that agrees with all pairs proves that they close no cycle
        job.phases = dataclasses.replace(job.phases, order=tuple(agreed))
    engine = Engine(job.graph, job.phases, host_device=config.host_device)
    shapes.run(engine)
    swapped = swapping.run(engine, config, default_kind=default_kind())
    siblings.run(engine, swapped, pairs)
    waiting.run(engine, swapped)
    return Proposal(engine, swapped)


def _auto(job: Job) -> Proposal | str:
    """Keep a memory limit: order the step, park what must be parked, and nothing where all fits."""
    records.check_batch(job.graph, job.phases, job.config)
    limit = limit_of(job)
    if limit >= job.before.peak_bytes:
        return _fits(job, limit)
    outcome = automatic.run(
        job.graph, job.phases, job.config, costs_of(job), limit, default_kind=default_kind()
    )
    return Proposal(outcome.engine, outcome.swapped, outcome)


def _fits(job: Job, limit: int) -> str:
    return (
        f"nothing was changed: the step needs {job.before.peak_bytes} bytes as it is (predicted), "
        f"memory_limit is {limit}"
    )


def _checkpointed(job: Job) -> Proposal | str:
    """Recompute as a schedule says, and nothing where all fits."""
    limit = None if job.config.memory_limit is None else limit_of(job)
    if limit is not None and limit >= job.before.peak_bytes:
        return _fits(job, limit)
    done = checkpointing.run(job.graph, job.phases, job.config, costs_of(job), limit)
    return Proposal(done.engine, [], checkpointed=done)


def _replayed(job: Job, plan: Plan) -> Proposal | str:
    """Apply a plan's rules to the IR."""
    if not plan.changes:
        return plan.notes[0] if plan.notes else "nothing was changed: the plan is empty"
    planned: Sequence[Any] | None = plan.order
    if job.config.strategy in CHECKPOINTING:
        planned = checkpointing.order_for(job.graph, job.phases, job.config)
    elif planned is None:
        pairs = siblings.pairs(job.graph, job.phases)
        agreed = order.with_edges(job.graph, job.phases.order, pairs) or job.phases.order
        job.phases = dataclasses.replace(job.phases, order=tuple(agreed))
    engine = Engine(job.graph, job.phases, host_device=job.config.host_device, order=planned)
    planning.replay(engine, plan.steps)
    swapped = automatic.swapped_in(engine)
    if plan.order is None:
        return Proposal(engine, swapped)
    outcome = automatic.outcome_of(engine, swapped, job.config, costs_of(job), plan.order_edges)
    return Proposal(engine, swapped, outcome)


def timeline_of(job: Job, proposal: Proposal) -> Timeline:
    """Simulate the IR as it was rewritten, in the order that its edges keep."""
    if proposal.checkpointed is not None:
        return proposal.checkpointed.timeline
    if proposal.outcome is not None:
        return _packed(job, proposal.outcome)
    return simulate.simulate(job.graph, job.weights(), job.within(), costs=costs_of(job))


def _packed(job: Job, outcome: automatic.Outcome) -> Timeline:
    """Count what the allocator hands out beyond what was asked for, in a device of the limit.

    In the planned order: the executor runs the loss as soon as it can, though the limit also holds
    where it leaves it for later.
    """
    weights, within = job.weights(), set(outcome.timeline.order)
    planned = [op for op in outcome.engine.witness if op in within]
    replay = simulate.Replay(job.graph, weights, within, costs_of(job))
    timeline = replay.run(planned)
    waste = packing.waste_of(weights.kind or default_kind())
    peak = packing.packed_peak(replay.events(planned), limit_of(job), waste)
    if peak is None or peak <= timeline.peak_bytes:
        return timeline
    return dataclasses.replace(timeline, peak_bytes=peak)


def limit_of(job: Job) -> int:
    """Return the memory limit in bytes; a fraction is one of the peak as it is.

    Raises:
        ConfigError: there is none.
    """
    limit = job.config.memory_limit
    if limit is None:
        raise ConfigError("strategy 'auto' keeps a memory_limit; set it to the device's bytes")
    return int(limit * job.before.peak_bytes) if isinstance(limit, float) else int(limit)


def costs_of(job: Job) -> cost.Costs:
    """Return the costs that ``cost`` asks for; they are made once a job."""
    if job._costs is None:
        limited = job.config.memory_limit is not None
        job._costs = costing.costs_for(
            job.read, job.config, job.weights(), job.phases,
            fits=not limited or job.before.peak_bytes <= limit_of(job),
            relieve=lambda graph, config, fetches: rewrite(graph, config, fetches=fetches),
        )  # fmt: skip
    return job._costs


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


def _finish(job: Job, proposal: Proposal, keep: bool) -> Report:
    graph, config = job.graph, job.config
    engine, swapped, outcome = proposal.engine, proposal.swapped, proposal.outcome
    verify(graph)
    erase.check(graph, job.read.original_edges())
    weights = job.weights()
    after = timeline_of(job, proposal)
    notes: tuple[str, ...] = ()
    recomputed = checkpointing.recomputed_in(graph)
    if not (swapped or recomputed or (outcome and outcome.order_edges)):
        notes = ("nothing was changed: no value has a late use with an anchor to wait for",)
    elif after.peak_bytes > job.before.peak_bytes:
        notes = (
            "nothing was changed: the simulation predicts a peak of "
            f"{after.peak_bytes} bytes after the rewrite and {job.before.peak_bytes} before",
        )
    if config.host_memory_limit is not None and after.host_peak_bytes > int(
        config.host_memory_limit
    ):
        raise InfeasibleError(
            f"the plan parks {after.host_peak_bytes} bytes on the host, more than "
            f"host_memory_limit={config.host_memory_limit}; raise it, or lower n_tensors",
            minimum_bytes=after.host_peak_bytes,
        )
    if notes:
        graph.rollback(0)
        return _report(job, (), job.before, 0, tuple(engine.refusals), notes)
    write.hand_back(job.read, job.phases.step, keep=keep)
    inserted = len(graph) - graph.original_ops
    swaps = tuple(records.swap(graph, s, weights) for s in swapped)
    report = _report(job, swaps, after, inserted, tuple(engine.refusals), ())
    report.recomputes = tuple(Recompute(*r.names(graph)) for r in recomputed)
    if proposal.checkpointed is not None:
        report.notes = proposal.checkpointed.told()
        report.plain_seconds = proposal.checkpointed.plain_seconds  # by the same costs
    if job._costs is not None and job._costs.source != "static":
        report.notes += (f"costs were {job._costs.source}",)
    if outcome is not None:
        report.orders = records.orders(engine)
        report.floor_bytes = outcome.floor.nbytes
        report.plain_seconds = records.plain_seconds(graph, after, costs_of(job))
        report.notes += (f"{outcome.order_edges} control edges fix the order of the step",)
    return report


def _report(
    job: Job,
    swaps: tuple[Swap, ...],
    after: Timeline,
    inserted: int,
    refusals: tuple[Any, ...],
    notes: tuple[str, ...],
) -> Report:
    graph, config = job.graph, job.config
    weights = job.weights()
    unknown = sorted({op.type for op in graph.ops() if not effects.of(op.type).known})
    kept = (op for op in graph.ops() if op.joins_step and op.role != "clone")
    names = [op.name for op in kept] if inserted else []
    report = Report(
        strategy=str(config.strategy),
        config=config.to_dict(),
        graph_ops=len(job.read.tf_ops),
        inserted_ops=inserted,
        levels=max(job.phases.level) + 1,
        swaps=swaps,
        refusals=refusals,
        plain_peak_bytes=job.before.peak_bytes,
        predicted_peak_bytes=after.peak_bytes,
        predicted_seconds=after.seconds,
        plain_seconds=job.before.seconds,
        host_bytes=after.host_peak_bytes if inserted else 0,
        moved_bytes=after.moved_bytes if inserted else 0,
        unknown_sizes=len(weights.unknown),
        unknown_ops=tuple(unknown),
        notes=notes,
        seconds=time.perf_counter() - job.started,
        facts=Facts(graph, job.phases, config),  # holds nothing of TensorFlow's graph
    )
    device = config.device or cost.main_device(graph) or f"{default_kind()}:0"
    report._measure = functools.partial(measure.measure_steps, device)
    if names:
        targets = survival.targets_of(job.read, job.phases)
        tf_graph = job.read.tf_graph
        report._verify = lambda session_config: survival.check_graph(
            tf_graph, names, targets, session_config
        )
        report.inserted_names = tuple(names)
    _log.info(
        "%s: %d swaps, %d refusals, predicted peak %d -> %d bytes, %.2f s",
        config.strategy, len(swaps), len(refusals), report.plain_peak_bytes,
        report.predicted_peak_bytes, report.seconds,
    )  # fmt: skip
    return report
