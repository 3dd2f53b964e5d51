"""Counts what each method costs: serial and total FLOPs, bytes over cuts, memory per device.

Serial FLOPs are those of the longest chain of dependent work in one step when each window has its
own worker (arXiv 2012.03837, cost and time): layers of a window one after the other, forward F and
backward 2F, and its head the same. FLOPs are the contractions that a trace of the model contains.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import tensorflow as tf

from tflms.local_updates.flops import flops_of, live_operations
from tflms.local_updates.measure import dtype_bytes
from tflms.local_updates.plan import SplitPlan
from tflms.local_updates.windows import Window

_STEP = 3  # forward once, backward twice: for the inputs and for the weights


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one training step of one method.

    Attributes:
        method: the method.
        batch_size: examples in the step.
        workers: how many windows can work at once.
        serial_flops: FLOPs of the longest dependent chain.
        total_flops: FLOPs of all work, in the given form.
        cut_bytes: per cut, bytes that cross it both ways.
        step_bytes: their sum.
        device_bytes: per chunk, memory of a device that trains it alone.
        fused_bytes: memory of one device that trains the chunks in turn.
    """

    method: str
    batch_size: int
    workers: int
    serial_flops: int
    total_flops: int
    cut_bytes: tuple[int, ...]
    step_bytes: int
    device_bytes: tuple[int, ...]
    fused_bytes: int


def head_flops(trainer: Any) -> tuple[int, ...]:
    """Return the forward FLOPs of each chunk's head for a batch of the plan's size (0: none)."""
    found = []
    for stage in trainer.stages:
        head = None if stage.exit is None else stage.exit.head
        if head is None:
            found.append(0)
            continue
        shape = [trainer.plan.batch_size, *head.inputs[0].shape[1:]]
        spec = tf.TensorSpec(shape, head.inputs[0].dtype)
        graph = tf.function(head, autograph=False).get_concrete_function(spec).graph
        found.append(flops_of(live_operations(graph)))
    return tuple(found)


def step_cost(
    trainer: Any, *, form: str | None = None, queue_size: int | None = None, slots: int = 2
) -> Cost:
    """Return the cost of one step of a trainer's method on the plan's batch size.

    Args:
        trainer: the trainer; it need not be compiled.
        form: ``"duplicates"`` counts windows that run their blocks again; default: the trainer's.
        queue_size: batches that wait in front of a chunk; default: the trainer's.
        slots: optimizer values per weight.
    """
    plan: SplitPlan = trainer.plan
    windows: tuple[Window, ...] = trainer.windows
    twice = (form or trainer.form) == "duplicates"
    heads = head_flops(trainer)
    forward = [chunk.flops for chunk in plan.chunks]
    chains = [_STEP * (sum(forward[w.first : w.last + 1]) + heads[w.last]) for w in windows]
    trained = {index for w in windows for index in range(w.first, w.last + 1)}
    if twice:
        total = sum(chains)
    else:
        total = sum(_STEP * f if index in trained else f for index, f in enumerate(forward))
        total += sum(_STEP * heads[w.last] for w in windows)
    serial = max(chains)
    if trainer.method == "last":
        serial += sum(forward[:-1])
    return Cost(
        method=trainer.method,
        batch_size=plan.batch_size,
        workers=len(windows),
        serial_flops=serial,
        total_flops=total,
        cut_bytes=cut_bytes(plan, windows),
        step_bytes=sum(cut_bytes(plan, windows)),
        device_bytes=tuple(
            plan.memory(
                index,
                queue_size=trainer.queue_size if queue_size is None else queue_size,
                slots=slots,
                head_bytes=_head_bytes(trainer.stages[index], slots=slots),
                label_bytes=label_bytes(trainer),
            )
            for index in range(len(plan.chunks))
        ),
        fused_bytes=_fused_bytes(trainer, slots=slots),
    )


def cut_bytes(plan: SplitPlan, windows: tuple[Window, ...]) -> tuple[int, ...]:
    """Return the bytes that cross each cut in one step: activations, and cotangents of windows."""
    found = []
    for index, cut in enumerate(plan.cuts):
        floats = 0
        for shape, dtype in zip(cut.shapes, cut.dtypes, strict=True):
            if "float" in dtype:
                sizes = [plan.batch_size, *[size or 1 for size in shape[1:]]]
                floats += prod(sizes) * dtype_bytes(dtype)
        over = [w for w in windows if w.first <= index < w.last]
        found.append(cut.nbytes + floats * len(over))
    return tuple(found)


def label_bytes(trainer: Any) -> int:
    """Return the bytes of one batch of class numbers, the labels that travel along."""
    output = trainer.source.outputs[0]
    positions = prod(size or 1 for size in output.shape[1:-1])
    return int(trainer.plan.batch_size * positions * dtype_bytes("int32"))


def traced_step_flops(trainer: Any, *, labels: str = "int32") -> int:
    """Return the FLOPs that one fused step of a compiled trainer really runs, from its graph.

    Unlike the convention of ``step_cost``, a chunk's first layer has no product for its inputs, and
    a chunk of several layers in several windows forms its inner cotangents once per window.
    """
    plan = trainer.plan
    inputs = [
        tf.TensorSpec([plan.batch_size, *tensor.shape[1:]], tensor.dtype)
        for tensor in trainer.source.inputs
    ]
    target = [plan.batch_size, *trainer.source.outputs[0].shape[1:-1]]

    def step(x: Any, y: Any) -> Any:
        return trainer.train_step((x, y))

    traced = tf.function(step, autograph=False).get_concrete_function(
        inputs if len(inputs) > 1 else inputs[0], tf.TensorSpec(target, labels)
    )
    return flops_of(live_operations(traced.graph))


def _head_bytes(stage: Any, *, slots: int) -> int:
    if stage.exit is None or stage.exit.head is None:
        return 0
    values = sum(prod(v.shape) * dtype_bytes(v.dtype) for v in stage.exit.trainable_variables)
    return int(values * (2 + slots))


def _fused_bytes(trainer: Any, *, slots: int) -> int:
    """Weights and slots of all chunks, activations and gradients of the largest window."""
    plan = trainer.plan
    weights = sum(chunk.parameter_bytes for chunk in plan.chunks) * (1 + slots)
    heads = sum(_head_bytes(stage, slots=slots) for stage in trainer.stages)
    largest = max(
        sum(
            chunk.activation_bytes + chunk.parameter_bytes
            for chunk in plan.chunks[w.first : w.last + 1]
        )
        for w in trainer.windows
    )
    border = max([plan.input_bytes, *[cut.nbytes for cut in plan.cuts]])
    return int(weights + heads + largest + 2 * border)


def table(costs: list[Cost]) -> str:
    """Return costs as a table, the first one as the yardstick of the serial chain."""
    rows = [("method", "workers", "serial MFLOP/ex", "shorter", "total MFLOP/ex", "bytes/step")]
    rows += [
        (
            cost.method,
            str(cost.workers),
            f"{cost.serial_flops / cost.batch_size / 1e6:.1f}",
            f"{costs[0].serial_flops / cost.serial_flops:.2f}x",
            f"{cost.total_flops / cost.batch_size / 1e6:.1f}",
            str(cost.step_bytes),
        )
        for cost in costs
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
