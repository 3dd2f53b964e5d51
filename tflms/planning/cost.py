"""Bytes of every value and variable, and which operations run on the device: the static cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tflms.graph import effects
from tflms.graph.ir import Graph, OpId, ValueId


@dataclass(frozen=True, slots=True)
class Sizes:
    """What values weigh and where operations run.

    Attributes:
        nbytes: per value; 0 for handles; unknown dimensions count as the batch size, or 1.
        unknown: values whose size is not known from the graph alone.
        on_device: per operation, whether it runs on the accelerator that is to be relieved.
        variable_nbytes: bytes of all variables that live on the device.
    """

    nbytes: tuple[int, ...]
    unknown: frozenset[ValueId]
    on_device: tuple[bool, ...]
    variable_nbytes: int


def sizes(graph: Graph, *, device: str | None = None, batch_size: int | None = None) -> Sizes:
    """Weigh a graph.

    Args:
        graph: the graph.
        device: the accelerator; None takes the one that most operations name, and counts those
            that name none as running there.
        batch_size: what an unknown leading dimension stands for.
    """
    unknown: set[ValueId] = set()
    nbytes: list[int] = []
    for op_id in range(graph.size):
        if not graph.has(op_id):
            continue
        for value in graph.op(op_id).outputs:
            while len(nbytes) < value:
                nbytes.append(0)
            v = graph.value(value)
            size = v.nbytes(batch_size or 1) if v.is_tensor else 0
            shape = v.shape
            if v.is_tensor and (
                size is None or (batch_size is None and shape is not None and None in shape)
            ):
                unknown.add(value)
            nbytes.append(size if size is not None else _at_least(graph, value))
    chosen = device if device is not None else main_device(graph)
    on_device = [False] * graph.size
    for op in graph.ops():
        on_device[op.id] = not op.role.startswith("swap") and _same_device(op.device, chosen)
    variables = sum(
        int(op.attrs.get("variable_nbytes", 0)) for op in graph.ops() if on_device[op.id]
    )
    return Sizes(tuple(nbytes), frozenset(unknown), tuple(on_device), variables)


def _at_least(graph: Graph, value: ValueId) -> int:
    """A size for values whose shape is unknown: that of one element per known dimension."""
    v = graph.value(value)
    size = 4
    for dim in v.shape or ():
        size *= dim or 1
    return size


def main_device(graph: Graph) -> str:
    """Return the device that most compute operations name; empty where most name none."""
    votes: dict[str, int] = {}
    for op in graph.ops():
        if op.outputs and effects.of(op.type).movable:
            votes[op.device] = votes.get(op.device, 0) + 1
    return max(votes, key=lambda name: (votes[name], name), default="")


def _same_device(device: str, chosen: str) -> bool:
    """Compare devices by type and number; an operation that names none follows the chosen one."""
    if not device or not chosen:
        return not device or not _is_host(device)
    return short_device(device) == short_device(chosen)


def short_device(device: str) -> str:
    """Return ``EMU:0`` of ``/job:localhost/replica:0/task:0/device:EMU:0`` and of ``/emu:0``."""
    last = device.rstrip("/").rpartition("/")[2]
    parts = [part for part in last.split(":") if part and part.lower() != "device"]
    if not parts:
        return ""
    kind = parts[0].upper()
    return f"{kind}:{parts[1] if len(parts) > 1 and parts[1] != '*' else 0}"


def _is_host(device: str) -> bool:
    return short_device(device).startswith("CPU")


def device_order(order: Sequence[OpId], weights: Sizes) -> list[OpId]:
    """Return the operations of an order that run on the device."""
    return [op for op in order if weights.on_device[op]]
