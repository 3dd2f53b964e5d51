"""Read-only views of a graph: numpy arrays for number crunching, networkx for everything else."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import networkx as nx
import numpy as np
import numpy.typing as npt

from tflms.graph import variables
from tflms.graph.ir import Graph, OpId

_cached: weakref.WeakKeyDictionary[Graph, tuple[int, Arrays]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Arrays:
    """The ordering edges of a graph in compressed rows, by operation id.

    Attributes:
        alive: ``[size]`` bool, whether an operation of that id exists.
        starts: ``[size + 1]`` int64, where each operation's successors begin in ``targets``.
        targets: ``[edges]`` int64, operations ordered directly after.
        producer: ``[values]`` int64, the operation that makes each value.
        nbytes: ``[values]`` int64, sizes; -1 where unknown.
    """

    alive: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    producer: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]


def arrays(graph: Graph) -> Arrays:
    """Return the numpy snapshot of a graph; made once per version of it."""
    held = _cached.get(graph)
    if held is not None and held[0] == graph.version:
        return held[1]
    alive = np.fromiter((graph.has(i) for i in range(graph.size)), bool, graph.size)
    rows = [graph.successors(OpId(i)) if alive[i] else [] for i in range(graph.size)]
    starts = np.zeros(graph.size + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=starts[1:])
    values = [graph.value(i) for i in range(graph.value_count)]
    sizes = (v.nbytes() if v.is_tensor else 0 for v in values)
    snapshot = Arrays(
        alive=alive,
        starts=starts,
        targets=np.fromiter((t for row in rows for t in row), np.int64, int(starts[-1])),
        producer=np.fromiter((v.op for v in values), np.int64, len(values)),
        nbytes=np.fromiter((-1 if n is None else n for n in sizes), np.int64, len(values)),
    )
    _cached[graph] = (graph.version, snapshot)
    return snapshot


def to_networkx(graph: Graph) -> nx.MultiDiGraph:
    """Return a copy of the graph as a networkx multigraph.

    Nodes are operation ids with ``name``, ``type``, ``device``, ``role``; edges carry ``action``
    ("read", "update", "control") and, but for control edges, ``value`` and ``slot``. Leave out the
    update edges to get what orders a step.
    """
    view = nx.MultiDiGraph()
    for op in graph.ops():
        view.add_node(op.id, name=op.name, type=op.type, device=op.device, role=op.role)
    for edge in variables.edges(graph):
        attributes = {} if edge.value is None else {"value": edge.value, "slot": edge.slot}
        view.add_edge(edge.source, edge.target, action=edge.action, **attributes)
    return view
