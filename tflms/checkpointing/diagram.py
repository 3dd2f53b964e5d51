"""Draws a replayed schedule as text: what runs when, and what memory holds meanwhile."""

from __future__ import annotations

import math

from tflms.checkpointing.chain import Chain
from tflms.checkpointing.operations import Held, Item, Kind, Replay, Step
from tflms.units import format_bytes

_MARKS = {Kind.F_ALL: "A", Kind.F_CK: "c", Kind.F_NULL: "n", Kind.F_DROP: "D", Kind.B: "B"}
_LINES = {Held.ACTIVATION: "-", Held.SAVED: "="}
_BARS = " ▁▂▃▄▅▆▇█"
_LEGEND = (
    "A F_all  c F_ck  n F_null  D F_drop  B backward;  "
    "held at the end of the column: - activation  = saved set"
)


def draw(chain: Chain, replayed: Replay, width: int) -> str:
    """Return the drawing: operations to the right, a row a stage, memory at the bottom.

    A column is one operation, or several where the schedule has more operations than columns: then
    the last operation of each stage is shown. Rows are squeezed in the same way beyond 60 stages.
    """
    steps = replayed.steps
    per_column = max(1, math.ceil(len(steps) / max(width - 12, 1)))
    per_row = max(1, math.ceil(chain.stages / 60))
    columns = [steps[at : at + per_column] for at in range(0, len(steps), per_column)]
    grid = [[" "] * len(columns) for _ in range(math.ceil((chain.stages + 1) / per_row))]
    held: dict[Item, None] = {Item(Held.ACTIVATION, 0): None}
    for x, column in enumerate(columns):
        _advance(held, column)
        for item in held:
            if item.held is not Held.GRADIENT and grid[item.stage // per_row][x] != "=":
                grid[item.stage // per_row][x] = _LINES[item.held]
        for step in column:
            grid[step.operation.stage // per_row][x] = _MARKS[step.operation.kind]
    rows = [f"{_row_name(y, per_row):>10} {''.join(line)}".rstrip() for y, line in enumerate(grid)]
    peaks = [max(step.peak_bytes for step in column) for column in columns]
    bars = "".join(_BARS[round(8 * peak / max(replayed.peak_bytes, 1))] for peak in peaks)
    note = f"{per_column} operations a column, " if per_column > 1 else ""
    memory = f"{'memory':>10} {bars}  peak {format_bytes(replayed.peak_bytes)}"
    return "\n".join([*rows, memory, f"{'':>10} {note}{_LEGEND}"])


def _advance(held: dict[Item, None], column: tuple[Step, ...]) -> None:
    for step in column:
        held[step.produced] = None
        for item in step.released:
            held.pop(item, None)


def _row_name(row: int, per_row: int) -> str:
    first, last = row * per_row, (row + 1) * per_row - 1
    if per_row == 1:
        return f"stage {first}" if first else "input"
    return f"{first}..{last}"
