"""Decides without changing anything: ``tflms.plan`` and ``tflms.tune``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tflms.config import Config
from tflms.errors import InfeasibleError
from tflms.planning import tune as tuning
from tflms.planning.plan import Plan, record, structure_hash
from tflms.planning.simulate import Timeline
from tflms.runtime import limits, records
from tflms.runtime import rewrite as rewriting
from tflms.runtime.job import Job, start


def plan(
    graph: Any,
    config: Config | Mapping[str, Any] | None = None,
    *,
    loss: Any = None,
    fetches: Iterable[Any] | Any = (),
) -> Plan:
    """Decide how a graph would be rewritten, and change nothing.

    Args:
        graph: the training graph.
        config: a ``Config`` or a dict of its fields.
        loss: as of ``tflms.rewrite``.
        fetches: as of ``tflms.rewrite``.

    Returns:
        the plan: to be looked at, saved, and given to ``tflms.rewrite(graph, plan=plan)``.

    Raises:
        ConfigError: the config is wrong.
        GraphError: the graph is empty, lacks the loss or a fetch, or has no gradients.
        InfeasibleError: no plan meets the memory limit.
    """
    config = Config.of(config)
    return _decide(start(graph, config, loss=loss, fetches=fetches))


def _decide(job: Job) -> Plan:
    graph = job.graph
    structure = structure_hash(graph)
    proposal = rewriting.propose(job)
    if isinstance(proposal, str):
        return _plan(job, structure, note=proposal)
    return _plan(job, structure, proposal=proposal)


def _plan(
    job: Job, structure: str, *, note: str = "", proposal: rewriting.Proposal | None = None
) -> Plan:
    after = job.before if proposal is None else rewriting.timeline_of(job, proposal)
    outcome = None if proposal is None else proposal.outcome
    return Plan(
        config=job.config.to_dict(),
        structure=structure,
        loss=tuple(job.loss),
        targets=tuple(job.targets),
        order=None if outcome is None else outcome.order,
        steps=() if proposal is None else record(proposal.engine.log, job.graph),
        plain_peak_bytes=job.before.peak_bytes,
        predicted_peak_bytes=after.peak_bytes,
        plain_seconds=_plain_seconds(job, proposal, after),
        predicted_seconds=after.seconds,
        floor_bytes=None if outcome is None else outcome.floor.nbytes,
        host_bytes=0 if proposal is None else after.host_peak_bytes,
        moved_bytes=0 if proposal is None else after.moved_bytes,
        order_edges=0 if outcome is None else outcome.order_edges,
        notes=(note,) if proposal is None else proposal.notes,
    )


def _plain_seconds(job: Job, proposal: rewriting.Proposal | None, after: Timeline) -> float:
    """How long a plain step takes, by the costs that the plan was made with."""
    if proposal is None:
        return job.before.seconds
    if proposal.checkpointed is not None:
        return proposal.checkpointed.plain_seconds
    return records.plain_seconds(job.graph, after, rewriting.costs_of(job))


def tune(
    graph: Any,
    config: Config | Mapping[str, Any] | None = None,
    *,
    strategy: str = "chain_rule",
    memory_limit: int | float | str,
    loss: Any = None,
    fetches: Iterable[Any] | Any = (),
) -> Config:
    """Find the paper's dials that fit a memory limit at the least predicted step time.

    Args:
        graph: the training graph; it is not changed.
        config: settings that are not tuned (filters, device and so on).
        strategy: ``"chain_rule"`` or ``"direct_order"``.
        memory_limit: bytes, a text such as ``"8GiB"``, or a fraction of the peak as it is.
        loss: as of ``tflms.rewrite``.
        fetches: as of ``tflms.rewrite``.

    Returns:
        a config for ``tflms.rewrite``; ``n_tensors`` 0 where nothing has to be swapped.

    Raises:
        InfeasibleError: no setting of the dials fits, by simulation.
    """
    base = Config.of(config).replace(strategy=strategy, memory_limit=memory_limit)
    job = start(graph, base, loss=loss, fetches=fetches)
    limit = limits.limit_of(job)
    plain = base.replace(memory_limit=None)
    if job.before.peak_bytes <= limit:
        return plain.replace(n_tensors=0)

    def judge(dials: Mapping[str, Any]) -> tuple[int, float]:
        job.config = plain.replace(**dials)
        mark, phases = len(job.graph.journal), job.phases
        try:
            proposal = rewriting.propose(job)
            if isinstance(proposal, str):
                return job.before.peak_bytes, job.before.seconds
            after = rewriting.timeline_of(job, proposal)
            return after.peak_bytes, after.seconds
        finally:
            job.graph.rollback(mark)
            job.phases = phases

    best, lowest = tuning.search(judge, limit)
    if best is None:
        raise InfeasibleError(
            f"no setting of {strategy}'s dials keeps the step within {limit} bytes by simulation; "
            f"the least that was found is {lowest} bytes. strategy='auto' orders the step as well "
            "and may fit",
            minimum_bytes=lowest,
        )
    return plain.replace(**best)
