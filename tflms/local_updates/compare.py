"""Trains one network by several methods on the same batches; tabulates loss, FLOPs, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tflms.local_updates.cost import step_cost
from tflms.local_updates.splitting import split
from tflms.local_updates.study import training_losses
from tflms.local_updates.trainer import LocalTrainer
from tflms.units import format_bytes

_SMOOTH = 20  # steps in a running mean of losses
_RECOMPUTED = 4 / 3  # exact checkpointing runs each forward pass twice: 4F for 3F


@dataclass(frozen=True, slots=True)
class Row:
    """One method's outcome.

    Attributes:
        method: its name.
        equal_steps: last exit's loss after all steps.
        equal_flops: the loss when as many FLOPs were spent as backpropagation spends in all steps.
        serial_share: serial FLOPs of a step against backpropagation.
        fused_bytes: predicted memory of one device.
    """

    method: str
    equal_steps: float
    equal_flops: float
    serial_share: float
    fused_bytes: int


def compare(
    build: Callable[[], Any],
    data: tuple[Any, Any],
    *,
    steps: int,
    batch_size: int,
    optimizer: Callable[[], Any],
    loss: Any,
    heads: Any = "auto",
    chunks: Sequence[int] = (2, 3),
) -> list[Row]:
    """Train by backprop, chunks, overlapping windows and greedily, and return a row for each.

    Exact alternatives are added from backpropagation's own losses: checkpointing and swapping
    compute the same numbers, the first at 4/3 of the FLOPs, the second at the same.
    """
    makers: dict[str, tuple[str, int | None]] = {"backprop": ("backprop", 1)}
    makers |= {f"{count} chunks": ("chunked", count) for count in chunks}
    makers |= {"overlapping": ("overlapping", None), "greedy": ("greedy", None)}
    rows: list[Row] = []
    budget = serial = 0
    for name, (method, count) in makers.items():
        model = build()
        plan = split(model, chunks=count, batch_size=batch_size)
        trainer = LocalTrainer(model, plan, method=method, heads=heads)
        trainer.compile(optimizer=optimizer(), loss=loss)
        losses = training_losses(trainer, data, batch_size=batch_size, steps=steps)
        cost = step_cost(trainer)
        if not rows:
            budget, serial = cost.total_flops * steps, cost.serial_flops
        affordable = min(steps, budget // cost.total_flops)
        rows.append(
            Row(
                method=name,
                equal_steps=_mean(losses),
                equal_flops=_mean(losses[:affordable]),
                serial_share=cost.serial_flops / serial,
                fused_bytes=cost.fused_bytes,
            )
        )
        if name == "backprop":
            shorter = _mean(losses[: int(steps / _RECOMPUTED)])
            blocks = split(model, batch_size=batch_size)
            largest = max(chunk.activation_bytes for chunk in blocks.chunks)
            kept = cost.fused_bytes - plan.chunks[0].activation_bytes + largest
            borders = kept + sum(cut.nbytes for cut in blocks.cuts)  # each block's input stays
            rows.append(Row("checkpointing (exact)", _mean(losses), shorter, _RECOMPUTED, borders))
            rows.append(Row("swapping (exact)", _mean(losses), _mean(losses), 1.0, kept))
    return rows


def _mean(losses: Sequence[float]) -> float:
    last = losses[-_SMOOTH:]
    return sum(last) / len(last)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text."""
    cells = [
        ("method", "loss, equal steps", "loss, equal FLOPs", "serial FLOPs", "predicted memory")
    ]
    cells += [
        (
            row.method,
            f"{row.equal_steps:.3f}",
            f"{row.equal_flops:.3f}",
            f"{row.serial_share:.2f}x",
            format_bytes(row.fused_bytes),
        )
        for row in rows
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )
