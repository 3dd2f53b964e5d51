"""One call in order: read, simulate, rewrite, verify, erase, simulate, hand back, report."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tflms.checkpointing import strategy as checkpointing
from tflms.config import CHECKPOINTING, Config
from tflms.errors import ConfigError, GraphError, InfeasibleError
from tflms.graph import effects, erase, order
from tflms.graph.names import is_inserted
from tflms.graph.verify import verify
from tflms.planning import cost, simulate
from tflms.planning import plan as planning
from tflms.planning.plan import Plan
from tflms.planning.simulate import Timeline
from tflms.report import Recompute, Report, Survival, Swap
from tflms.rewriting.engine import Engine
from tflms.runtime import costing, limits, measure, records, survival, write
from tflms.runtime.facts import Facts
from tflms.runtime.job import Job, start
from tflms.runtime.placement import default_kind
from tflms.strategies import auto as automatic
from tflms.strategies import biases, shapes, siblings, waiting
from tflms.strategies import swap as swapping

_log = logging.getLogger(__name__)


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
    notes: tuple[str, ...] = ()


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
    limit = limits.limit_of(job)
    plain = limits.as_it_is(job, limit)
    if plain is not None and plain.fits:
        return limits.kept_as_it_is(job, limit, plain)
    costs = costs_of(job)
    try:
        outcome = automatic.run(
            job.graph, job.phases, job.config, costs, limit, default_kind=default_kind()
        )
    except InfeasibleError as error:
        job.graph.rollback(0)
        raise limits.refused(job, error) from None
    notes = () if plain is None else (f"{limits.may_need(job, plain)}: its order is fixed",)
    return Proposal(outcome.engine, outcome.swapped, outcome, notes=notes)


def _checkpointed(job: Job) -> Proposal | str:
    """Recompute as a schedule says, and nothing where all fits."""
    limit = None if job.config.memory_limit is None else limits.limit_of(job)
    plain = None if limit is None else limits.as_it_is(job, limit)
    if limit is not None and plain is not None and plain.fits:
        return limits.kept_as_it_is(job, limit, plain)
    done = checkpointing.run(job.graph, job.phases, job.config, costs_of(job), limit)
    if plain is not None and not checkpointing.recomputed_in(job.graph):
        job.graph.rollback(0)
        return f"nothing was changed: all is kept; {limits.may_need(job, plain)}"
    notes = () if plain is None else (f"{limits.may_need(job, plain)}: its order is fixed",)
    return Proposal(done.engine, [], checkpointed=done, notes=notes)


def _replayed(job: Job, plan: Plan) -> Proposal | str:
    """Apply a plan's rules to the IR."""
    if not plan.changes:
        return plan.notes[0] if plan.notes else "nothing was changed: the plan is empty"
    if plan.order is not None:
        costs_of(job)  # of the graph as it is, by which the plan was made
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
    return Proposal(engine, swapped, outcome, notes=plan.notes)


def timeline_of(job: Job, proposal: Proposal) -> Timeline:
    """Simulate the IR as it was rewritten, in the order that its edges keep."""
    if proposal.checkpointed is not None:
        return proposal.checkpointed.timeline
    if proposal.outcome is not None:
        return limits.packed(job, proposal.outcome, costs_of(job))
    return simulate.simulate(job.graph, job.weights(), job.within(), costs=costs_of(job))


def costs_of(job: Job) -> cost.Costs:
    """Return the costs that ``cost`` asks for; they are made once a job."""
    if job._costs is None:
        limited = job.config.memory_limit is not None
        job._costs = costing.costs_for(
            job.read, job.config, job.weights(), job.phases,
            fits=not limited or job.before.peak_bytes <= limits.limit_of(job),
            relieve=lambda graph, config, fetches: rewrite(graph, config, fetches=fetches),
        )  # fmt: skip
    return job._costs


def _finish(job: Job, proposal: Proposal, keep: bool) -> Report:
    graph, config = job.graph, job.config
    engine, swapped, outcome = proposal.engine, proposal.swapped, proposal.outcome
    verify(graph)
    erase.check(graph, job.read.original_edges())
    biases.check(graph, default_kind())
    weights = job.weights()
    after = timeline_of(job, proposal)
    notes: tuple[str, ...] = ()
    recomputed = checkpointing.recomputed_in(graph)
    if outcome is not None and not (swapped or recomputed or outcome.order_edges):
        notes = (
            "nothing was changed: what the step needs is in the only order that it has "
            f"(predicted: {after.peak_bytes} bytes)",
        )
    elif outcome is None and not (swapped or recomputed):
        notes = ("nothing was changed: no value has a late use with an anchor to wait for",)
    elif outcome is None and after.peak_bytes > job.before.peak_bytes:
        notes = (
            "nothing was changed: the simulation predicts a peak of "
            f"{after.peak_bytes} bytes after the rewrite and {job.before.peak_bytes} before",
        )
    if config.host_memory_limit is not None and after.host_peak_bytes > int(
        config.host_memory_limit
    ):
        helps = "raise memory_limit" if config.strategy == "auto" else "lower n_tensors"
        raise InfeasibleError(
            f"the plan parks {after.host_peak_bytes} bytes on the host, more than "
            f"host_memory_limit={config.host_memory_limit}; raise it, or {helps}: less is parked",
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
    report.notes += proposal.notes
    if job._costs is not None and job._costs.source != "static":
        report.notes += (f"costs were {job._costs.source}",)
    if outcome is not None:
        report.orders = records.orders(engine)
        report.floor_bytes = outcome.floor.nbytes
        report.plain_seconds = records.plain_seconds(graph, after, costs_of(job))
        report.notes += (f"{outcome.order_edges} control edges fix the order of the step",)
    if report._verify is None and report.changed:  # it only waits: there is nothing to remove
        report._verify = lambda _: Survival(expected=0, survived=0, missing=())
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
        notes=(*notes, *(limits.uncounted(job) if config.strategy == "auto" else ())),
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
