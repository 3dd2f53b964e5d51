"""Decides what a memory limit asks for: whether a step keeps it as it is, and what a plan holds."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from tflms.errors import ConfigError, InfeasibleError
from tflms.graph import effects
from tflms.planning import packing
from tflms.planning.cost import Costs, static_costs
from tflms.planning.simulate import Replay, Timeline
from tflms.planning.unordered import Unordered, enough_bytes, unordered
from tflms.runtime.job import Job
from tflms.runtime.placement import default_kind
from tflms.strategies.auto import Outcome

_REAL = ("f16", "bf16", "f32", "f64")


def limit_of(job: Job) -> int:
    """Return the memory limit in bytes; a fraction is one of the peak as it is.

    Raises:
        ConfigError: there is none.
    """
    limit = job.config.memory_limit
    if limit is None:
        raise ConfigError("strategy 'auto' keeps a memory_limit; set it to the device's bytes")
    return int(limit * job.before.peak_bytes) if isinstance(limit, float) else int(limit)


def packed(job: Job, outcome: Outcome, costs: Costs) -> Timeline:
    """Count what the allocator hands out beyond what was asked for, in a device of the limit.

    In the planned order: the executor runs the loss as soon as it can, though the limit also holds
    where it leaves it for later.
    """
    weights, within = job.weights(), set(outcome.timeline.order)
    planned = [op for op in outcome.engine.witness if op in within]
    replay = Replay(job.graph, weights, within, costs)
    timeline = replay.run(planned)
    peak = packing.packed_peak(replay.events(planned), limit_of(job), _waste(job))
    if peak is None or peak <= timeline.peak_bytes:
        return timeline
    return dataclasses.replace(timeline, peak_bytes=peak)


def as_it_is(job: Job, limit: int) -> Unordered | None:
    """Return what a step may need that nothing orders; None where it is over the limit anyway."""
    if limit < job.before.peak_bytes:
        return None
    return unordered(job.graph, _replay(job), job.within(), limit, waste=_waste(job))


def refused(job: Job, error: InfeasibleError) -> InfeasibleError:
    """Return the error for a limit that no plan keeps; it names one at which nothing is changed.

    Unless it names a smaller one already. The graph has to be as it was.
    """
    named = error.minimum_bytes
    if named is not None and named <= job.before.peak_bytes:
        return error
    enough = enough_bytes(job.graph, _replay(job), job.within(), waste=_waste(job))
    if named is not None and named <= enough:
        return error
    text = f"{error}. At a limit of {enough} bytes nothing has to be changed"
    return InfeasibleError(text, minimum_bytes=enough, **error.details)


def kept_as_it_is(job: Job, limit: int, plain: Unordered) -> str:
    """Say that nothing is changed, because the step keeps the limit in any order."""
    return (
        f"nothing was changed: the step needs {job.before.peak_bytes} bytes as it is, and at most "
        f"{plain.most_bytes} in whichever order the executor runs it (predicted); memory_limit is "
        f"{limit}"
    )


def may_need(job: Job, plain: Unordered) -> str:
    """Say what a step may need that fits in most orders and not in all."""
    return (
        f"as it is, the step needs {job.before.peak_bytes} bytes (predicted), but up to "
        f"{plain.most_bytes}, holes between buffers not counted, where the executor runs it in "
        "another order"
    )


def uncounted(job: Job) -> tuple[str, ...]:
    """Say what no prediction counts: values of unknown size, and what loops and branches hold."""
    graph, weights = job.graph, job.weights()
    ours = (op for op in graph.ops() if op.id < graph.original_ops and job.phases.step[op.id])
    here = [op for op in ours if weights.on_device[op.id]]
    unknown = weights.unknown.difference(weights.reserves)
    sizes = [v for op in here for v in op.outputs if v in unknown and graph.value(v).dtype in _REAL]
    closed = [op for op in here if op.frame or op.type in effects.FUNCTIONAL]
    notes: list[str] = []
    if sizes:
        notes.append(
            f"the sizes of {len(sizes)} values are not known "
            f"({_some(graph.value_name(v) for v in sizes)}), so predicted peaks count them as next "
            "to nothing; give them a shape (tf.ensure_shape)"
        )
    if closed:
        notes.append(
            f"{len(closed)} operations are loops, branches or calls, or inside one "
            f"({_some(op.name for op in closed)}); what these hold for themselves is not in "
            "predicted peaks"
        )
    return tuple(notes)


def _some(names: Iterable[str]) -> str:
    found = [repr(name) for name in itertools.islice(names, 4)]
    return ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")


def _replay(job: Job) -> Replay:
    weights = job.weights()
    return Replay(job.graph, weights, job.within(), static_costs(job.graph, weights))


def _waste(job: Job) -> int:
    return packing.waste_of(job.weights().kind or default_kind())
