"""Bytes of every value, seconds of every operation, rates of the link: what a plan is judged by."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tflms.errors import ConfigError
from tflms.graph import effects
from tflms.graph.ir import Graph, ValueId
from tflms.planning import kernels

COSTS_FORMAT = 1
_LAUNCH_SECONDS = 5e-6


@dataclass(frozen=True, slots=True)
class Rates:
    """What a kind of device does in a second.

    Attributes:
        flops: multiplications and additions.
        memory: bytes that element-wise kernels touch.
        to_host: bytes over the link to the host.
        to_device: bytes over the link from the host.
    """

    flops: float
    memory: float
    to_host: float
    to_device: float


# An accelerator of the paper's time, reduced to what can be hoped for: estimates.
ACCELERATOR = Rates(flops=5e12, memory=4e11, to_host=1.2e10, to_device=1.2e10)
# Kernels of the CPU, on two cores; what they park is copied within the host's memory. Read off
# traced steps of ResNet-50, a transformer and a 3D U-Net on the emulated accelerator.
PROCESSOR = Rates(flops=1e11, memory=2e10, to_host=8e9, to_device=8e9)
_ON_PROCESSOR = ("CPU", "EMU")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What values weigh and where operations run.

    Attributes:
        nbytes: per value; 0 for handles; unknown dimensions count as the batch size, or 1.
        unknown: values whose size is not known from the graph alone.
        on_device: per operation, whether it runs on the accelerator that is to be relieved.
        variable_nbytes: bytes of all variables that live on the device.
        reserves: values whose size depends on what the runtime fuses.
        kind: of that device, such as ``GPU``; empty where the graph names none.
    """

    nbytes: tuple[int, ...]
    unknown: frozenset[ValueId]
    on_device: tuple[bool, ...]
    variable_nbytes: int
    reserves: tuple[ValueId, ...] = ()
    kind: str = ""


def sizes(graph: Graph, *, device: str | None = None, batch_size: int | None = None) -> Sizes:
    """Weigh a graph.

    Args:
        graph: the graph.
        device: the accelerator; None takes the one that most operations name, and counts those
            that name none as running there.
        batch_size: what an unknown leading dimension stands for.
    """
    unknown: set[ValueId] = set()
    reserves: list[ValueId] = []
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
            if size is None:
                size = kernels.reserve_nbytes(graph, value, nbytes)
                if size is not None:
                    reserves.append(value)
            nbytes.append(size if size is not None else _at_least(graph, value))
    _look_at_views(graph, nbytes, unknown, reserves)
    chosen = device if device is not None else main_device(graph)
    on_device = [False] * graph.size
    for op in graph.ops():
        on_device[op.id] = not op.role.startswith("swap") and _same_device(op.device, chosen)
    variables = sum(
        int(op.attrs.get("variable_nbytes", 0)) for op in graph.ops() if on_device[op.id]
    )
    kind = device_kind(chosen)
    return Sizes(
        tuple(nbytes), frozenset(unknown), tuple(on_device), variables, tuple(reserves), kind
    )


def _look_at_views(
    graph: Graph, nbytes: list[int], unknown: set[ValueId], reserves: Collection[ValueId]
) -> None:
    """Weigh values of unknown shape that a reshaping, or a promise of a shape, shows whole."""
    for op in sorted(graph.ops(), key=lambda op: -op.id) if unknown else ():
        if effects.of(op.type).view and len(op.outputs) == 1 and op.inputs:
            shown, result = op.inputs[0], op.outputs[0]
            if shown in unknown and shown not in reserves and result not in unknown:
                nbytes[shown] = nbytes[result]
                unknown.remove(shown)


def with_inserted(graph: Graph, weights: Sizes) -> Sizes:
    """Weigh what was inserted since a graph was weighed, and what that keeps from being fused."""
    nbytes = list(weights.nbytes[: graph.value_count])
    for value in weights.reserves:
        nbytes[value] = kernels.reserve_nbytes(graph, value, nbytes) or 0
    on_device = list(weights.on_device[: graph.size])
    unknown = set(weights.unknown)
    for op_id in range(len(on_device), graph.size):
        if not graph.has(op_id):
            on_device.append(False)
            continue
        op = graph.op(op_id)
        twin = op if op.origin is None else graph.op(op.origin)
        sources = op.inputs if op.origin is None else twin.outputs
        for value, source in zip(op.outputs, sources, strict=False):
            nbytes += [0] * (value - len(nbytes))
            nbytes.append(nbytes[source])
            if source in unknown:
                unknown.add(value)
        place = twin.id if op.origin is not None else graph.value(op.inputs[0]).op
        on_device.append(not op.role.startswith("swap") and on_device[place])
    return dataclasses.replace(
        weights, nbytes=tuple(nbytes), unknown=frozenset(unknown), on_device=tuple(on_device)
    )


@dataclass(frozen=True, slots=True)
class Costs:
    """What operations and transfers cost.

    Attributes:
        seconds: per operation of the user's graph; inserted ones beyond that take none.
        workspace: scratch bytes per operation.
        to_host: bytes per second from the device to the host.
        to_device: bytes per second from the host to the device.
        source: "static" (an estimate from shapes) or what was measured, and how.
    """

    seconds: tuple[float, ...]
    workspace: tuple[int, ...]
    to_host: float = ACCELERATOR.to_host
    to_device: float = ACCELERATOR.to_device
    source: str = "static"

    def save(self, path: str | Path) -> None:
        """Write the costs to a JSON file."""
        data = {"format": COSTS_FORMAT, **dataclasses.asdict(self)}
        Path(path).write_text(json.dumps(data) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, *, ops: int | None = None) -> Costs:
        """Read costs from a JSON file.

        Args:
            path: the file.
            ops: how many operations the graph has that they are for; None does not check.

        Raises:
            ConfigError: the file cannot be read, or is for a graph of another size.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data.pop("format") != COSTS_FORMAT:
                raise ValueError("it was written in another format")
            data["seconds"] = tuple(float(x) for x in data["seconds"])
            data["workspace"] = tuple(int(x) for x in data["workspace"])
            costs = cls(**data)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"cannot read costs from {str(path)!r} ({error}); cost= is 'static', 'measured' or "
                "a file that Costs.save() wrote"
            ) from None
        if ops is not None and len(costs.seconds) != ops:
            raise ConfigError(
                f"the costs in {str(path)!r} are for a graph of {len(costs.seconds)} operations; "
                f"this one has {ops}: measure them again"
            )
        return costs


def typical_rates(kind: str) -> Rates:
    """Return what a kind of device (``GPU``, ``CPU``, ``EMU``) can be taken to do in a second."""
    return PROCESSOR if kind in _ON_PROCESSOR else ACCELERATOR


def static_costs(graph: Graph, weights: Sizes, rates: Rates | None = None) -> Costs:
    """Estimate costs from shapes alone: arithmetic and bytes touched over rates.

    Args:
        graph: the graph.
        weights: its sizes and placement.
        rates: of the device and its link; None takes what is typical of its kind.
    """
    rates = typical_rates(weights.kind) if rates is None else rates
    seconds, workspace = [0.0] * graph.original_ops, [0] * graph.original_ops
    for op in graph.ops():
        if op.id >= graph.original_ops or not weights.on_device[op.id]:
            continue
        workspace[op.id] = kernels.workspace_nbytes(op, weights.nbytes)
        if not op.outputs or effects.of(op.type).view:
            continue
        touched = sum(weights.nbytes[v] for v in (*op.inputs, *op.outputs))
        seconds[op.id] = _LAUNCH_SECONDS + max(
            kernels.flops(graph, op) / rates.flops, touched / rates.memory
        )
    return Costs(tuple(seconds), tuple(workspace), rates.to_host, rates.to_device)


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


@functools.lru_cache(maxsize=1024)
def short_device(device: str) -> str:
    """Return ``EMU:0`` of ``/job:localhost/replica:0/task:0/device:EMU:0`` and of ``/emu:0``."""
    last = device.rstrip("/").rpartition("/")[2]
    parts = [part for part in last.split(":") if part and part.lower() != "device"]
    if not parts:
        return ""
    kind = parts[0].upper()
    return f"{kind}:{parts[1] if len(parts) > 1 and parts[1] != '*' else 0}"


def device_kind(device: str, default: str = "") -> str:
    """Return ``EMU`` of ``/job:localhost/replica:0/task:0/device:EMU:0``; the default of none."""
    return short_device(device).partition(":")[0] or default


def _is_host(device: str) -> bool:
    return short_device(device).startswith("CPU")
