"""Cuts a Keras model into chunks: finds the places, weighs them, builds the chunk models."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import keras

from tflms.errors import ConfigError, GraphError
from tflms.local_updates.balance import balanced_cuts
from tflms.local_updates.measure import Measures, dtype_bytes, measure, tensor_bytes
from tflms.local_updates.network import Network, read_network
from tflms.local_updates.plan import Chunk, ChunkNet, Cut, SplitPlan

_ADAM_SLOTS = 2


def split(
    model: Any,
    *,
    chunks: int | None = None,
    at: Sequence[Any] | None = None,
    balance: str = "time",
    batch_size: int = 32,
) -> SplitPlan:
    """Cut a Sequential or functional model into chunks that can train by their own losses.

    With neither ``chunks`` nor ``at``, the model is cut behind every block: wherever a single
    tensor crosses, and each chunk holds a kernel.

    Args:
        model: the built model; its layers and weights are shared, not copied.
        chunks: how many chunks; the cuts are chosen by ``balance``.
        at: instead, a layer name (or a tuple of names) per cut: it lies behind these layers.
        balance: ``"time"`` levels the FLOPs, ``"memory"`` the bytes a device needs.
        batch_size: batch size that the plan's figures are for.

    Raises:
        ConfigError: an argument is wrong, or there are fewer places to cut than asked for.
        GraphError: the model cannot be read, or a cut would part tied weights or a mask.
    """
    if balance not in ("time", "memory"):
        raise ConfigError(f"balance={balance!r} is unknown; use 'time' or 'memory'")
    if chunks is not None and at is not None:
        raise ConfigError("give chunks= or at=, not both: at= already fixes how many chunks")
    if chunks is not None and (not isinstance(chunks, int) or chunks < 1):
        raise ConfigError(f"chunks={chunks!r} is no number of chunks; use 1 or more")
    if isinstance(at, str):
        raise ConfigError(f"at={at!r} is one name; give a list, with a name per cut")
    network = read_network(model)
    measures = measure(network, batch_size=batch_size)
    if at is not None:
        sides = _sides_at(network, at)
    elif chunks is None:
        sides = [_prefix(end) for end in _block_ends(network)]
    else:
        sides = _balanced(network, measures, chunks=chunks, balance=balance)
    return _build(model, network, measures, sides)


def _prefix(end: int) -> frozenset[int]:
    return frozenset(range(end))


def _refusal(network: Network, before: frozenset[int]) -> str | None:
    """Return why the model must not be cut here, or None."""
    tied = network.tied(before)
    if tied:
        names = ", ".join(tied)
        return (
            f"the weights {names} are used on both sides of the cut, and a loss on one side "
            "would not see the other; untie them (two layers) or cut where one side has all users"
        )
    masked = network.masked(network.crossing(before))
    if masked:
        return (
            f"the tensors {', '.join(masked)} carry a Keras mask that a cut cannot hand on; "
            "cut before the layer that makes the mask or pass the mask as a tensor"
        )
    return None


def _positions(network: Network, *, width: int | None) -> list[int]:
    """Return the legal cut positions that at most ``width`` tensors cross."""
    found = []
    for end in range(1, len(network.vertices)):
        before = _prefix(end)
        crossing = network.crossing(before)
        if (width is None or len(crossing) <= width) and _refusal(network, before) is None:
            found.append(end)
    return found


def _block_ends(network: Network) -> list[int]:
    """Return the positions behind blocks: of those with the same kernels before, the last one.

    So normalisation, activation, dropout and pooling stay with the layer that they follow.
    """
    kernels = list(accumulate(int(vertex.holds_kernel) for vertex in network.vertices))
    last: dict[int, int] = {}
    for position in _positions(network, width=1):
        last[kernels[position - 1]] = position
    total = kernels[-1] if kernels else 0
    return [position for count, position in sorted(last.items()) if 0 < count < total]


def _balanced(
    network: Network, measures: Measures, *, chunks: int, balance: str
) -> list[frozenset[int]]:
    if chunks == 1:
        return []
    end = len(network.vertices)
    flops = [0, *accumulate(measures.flops)]
    saved = [0, *accumulate(measures.saved_bytes)]
    weights = [0, *accumulate(_trainable_bytes(vertex) for vertex in network.vertices)]

    def cost(start: int, stop: int) -> float:
        if weights[stop] == weights[start]:
            return float("inf")
        if balance == "time":
            return flops[stop] - flops[start]
        kept = saved[stop] - saved[start]
        return kept + (weights[stop] - weights[start]) * (2 + _ADAM_SLOTS)

    def cut_bytes(position: int) -> float:
        crossing = network.crossing(_prefix(position))
        return sum(
            tensor_bytes(network.tensors[tensor], batch_size=measures.batch_size)
            for tensor in crossing
        )

    for positions in (
        _block_ends(network),
        _positions(network, width=1),
        _positions(network, width=2),
        _positions(network, width=None),
    ):
        found = balanced_cuts(positions, chunks=chunks, end=end, cost=cost, cut_bytes=cut_bytes)
        if found is not None:
            return [_prefix(position) for position in found]
    reasons = [
        reason
        for position in range(1, end)
        if (reason := _refusal(network, _prefix(position))) is not None
    ]
    hint = f"; one place is refused because {reasons[0]}" if reasons else ""
    raise ConfigError(
        f"model {network.model.name!r} cannot be cut into {chunks} chunks that each hold trainable "
        f"weights; ask for fewer{hint}"
    )


def _sides_at(network: Network, at: Sequence[Any]) -> list[frozenset[int]]:
    sides: list[frozenset[int]] = []
    for entry in at:
        names = entry if isinstance(entry, (tuple, list)) else (entry,)
        indices = [_vertex_named(network, str(getattr(name, "name", name))) for name in names]
        side = network.ancestors(indices).union(*sides)
        reason = _refusal(network, side)
        if reason is not None:
            raise GraphError(f"cannot cut {network.model.name!r} behind {entry!r}: {reason}")
        if (sides and side == sides[-1]) or len(side) == len(network.vertices):
            raise ConfigError(
                f"a cut behind {entry!r} leaves a chunk without layers; list the cuts of at= in "
                "the order of the network, none behind its last layer"
            )
        sides.append(side)
    return sides


def _vertex_named(network: Network, name: str) -> int:
    for index in reversed(range(len(network.vertices))):
        if network.vertices[index].name == name:
            return index
    names = [vertex.name for vertex in network.vertices]
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(names)}"
    raise ConfigError(f"model {network.model.name!r} has no layer {name!r} to cut behind{hint}")


def _trainable_bytes(vertex: Any) -> int:
    return sum(_size(v) * dtype_bytes(v.dtype) for v in vertex.variables if v.trainable)


def _size(variable: Any) -> int:
    size = 1
    for dimension in variable.shape:
        size *= dimension
    return size


def _build(
    model: Any, network: Network, measures: Measures, sides: list[frozenset[int]]
) -> SplitPlan:
    everything = _prefix(len(network.vertices))
    borders: list[frozenset[int]] = [frozenset(), *sides, everything]
    crossings = [network.crossing(side) for side in sides]
    incoming = [network.inputs, *crossings]
    outgoing = [*crossings, (network.output,)]
    chunks, nets = [], []
    for index, (before, upto) in enumerate(pairwise(borders)):
        members = sorted(upto - before)
        variables: dict[int, Any] = {}
        for member in members:
            for variable in network.vertices[member].variables:
                if variable.trainable:
                    variables[id(variable)] = variable
        chunks.append(
            Chunk(
                index=index,
                layers=tuple(network.vertices[member].name for member in members),
                parameters=sum(_size(v) for v in variables.values()),
                parameter_bytes=sum(_size(v) * dtype_bytes(v.dtype) for v in variables.values()),
                activation_bytes=sum(measures.saved_bytes[member] for member in members),
                flops=sum(measures.flops[member] for member in members),
            )
        )
        if len(borders) == 2:
            nets.append(ChunkNet(model, (("out", 0),)))
        else:
            nets.append(_chunk_net(network, index, incoming[index], outgoing[index]))
    return SplitPlan(
        chunks=tuple(chunks),
        cuts=tuple(_cut(network, crossing, measures.batch_size) for crossing in crossings),
        batch_size=measures.batch_size,
        input_bytes=sum(
            tensor_bytes(tensor, batch_size=measures.batch_size) for tensor in network.model.inputs
        ),
        model=model,
        nets=tuple(nets),
    )


def _chunk_net(
    network: Network, index: int, incoming: tuple[int, ...], outgoing: tuple[int, ...]
) -> ChunkNet:
    routes: list[tuple[str, int]] = []
    made: list[Any] = []
    for tensor in outgoing:
        if tensor in incoming:
            routes.append(("in", incoming.index(tensor)))
        else:
            routes.append(("out", len(made)))
            made.append(network.tensors[tensor])
    if not made:
        raise GraphError(f"chunk {index} computes nothing that leaves it; move or drop its cut")
    entering = [network.tensors[tensor] for tensor in incoming]
    model = keras.Model(entering if len(entering) > 1 else entering[0], made, name=f"chunk_{index}")
    return ChunkNet(model, tuple(routes))


def _readable(network: Network, tensor: int) -> str:
    """Return the name of the layer that makes a tensor, or of the input."""
    if tensor not in network.producer:
        return str(network.tensors[tensor].name)
    vertex = network.vertices[network.producer[tensor]]
    position = vertex.outputs.index(tensor)
    return vertex.name if len(vertex.outputs) == 1 else f"{vertex.name}:{position}"


def _cut(network: Network, crossing: tuple[int, ...], batch_size: int) -> Cut:
    tensors = [network.tensors[tensor] for tensor in crossing]
    return Cut(
        tensors=tuple(_readable(network, tensor) for tensor in crossing),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        dtypes=tuple(keras.backend.standardize_dtype(tensor.dtype) for tensor in tensors),
        nbytes=sum(tensor_bytes(tensor, batch_size=batch_size) for tensor in tensors),
    )
