"""The proof that a rewrite is on: what TensorFlow's own optimizers left of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tflms.graph.order import Phases
from tflms.planning.cost import short_device
from tflms.report import Survival
from tflms.runtime.read import ReadGraph


def targets_of(read: ReadGraph, phases: Phases) -> list[str]:
    """Return the names of the operations at the end of the step, which drag in all the others."""
    graph = read.graph
    return [
        read.tf_name(op)
        for op in phases.order
        if phases.step[op] and not any(phases.step[s] for s in _user_successors(graph, op))
    ]


def _user_successors(graph: Any, op: Any) -> list[Any]:
    return [s for s in graph.successors(op) if s < graph.original_ops]


def check_graph(
    tf_graph: Any, names: Sequence[str], targets: Sequence[str], session_config: Any
) -> Survival:
    """Put a graph through Grappler as a session would, and look for the inserted operations in it.

    Nothing is executed and no device is created: Grappler works on a cluster that only has names.
    """
    from tensorflow.core.protobuf import config_pb2, device_properties_pb2
    from tensorflow.python.grappler import cluster as grappler_cluster
    from tensorflow.python.grappler import tf_optimizer

    kinds = {short_device(op.device) for op in tf_graph.get_operations() if op.device}
    devices = [
        device_properties_pb2.NamedDevice(
            name=f"/job:localhost/replica:0/task:0/device:{kind}",
            properties=device_properties_pb2.DeviceProperties(type=kind.partition(":")[0]),
        )
        for kind in sorted(kinds | {"CPU:0"})
    ]
    with tf_graph.as_default():  # the export looks at the default graph to tell eager execution
        meta = tf.compat.v1.train.export_meta_graph(graph=tf_graph, clear_extraneous_savers=True)
    meta.collection_def.pop("train_op", None)  # a graph from a GraphDef has no collections
    meta.collection_def["train_op"].node_list.value.extend(targets)
    config = config_pb2.ConfigProto()
    if session_config is not None:
        config.CopyFrom(session_config)
    optimised = tf_optimizer.OptimizeGraph(
        config, meta, verbose=False, cluster=grappler_cluster.Cluster(devices=devices)
    )
    return count(names, [optimised])


def check_run(names: Iterable[str], run_metadata: Any) -> Survival:
    """Look for the inserted operations in the partition graphs of a real run.

    Args:
        names: the inserted operations.
        run_metadata: of a ``Session.run`` with ``RunOptions(output_partition_graphs=True)``.
    """
    return count(names, run_metadata.partition_graphs)


def count(names: Iterable[str], graph_defs: Iterable[Any]) -> Survival:
    """Count which of the names are nodes of the graphs, functions in them included."""
    present: set[str] = set()
    for graph_def in graph_defs:
        present.update(node.name for node in graph_def.node)
        for function in graph_def.library.function:
            present.update(node.name for node in function.node_def)
    wanted = list(names)
    missing = tuple(name for name in wanted if name not in present)
    return Survival(len(wanted), len(wanted) - len(missing), missing)
