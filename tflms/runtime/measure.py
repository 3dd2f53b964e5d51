"""Measures what a step costs: seconds and workspaces per operation, and the rates of the link."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tflms.errors import GraphError
from tflms.planning.cost import Costs, short_device, sizes, static_costs
from tflms.runtime import elapsed
from tflms.runtime import read as reading

_PROBE_NBYTES = 32 * 1024 * 1024
_REPEATS = 3
_WARM_UP_STEPS, _TRACED_STEPS = 2, 5


def measure_costs(
    graph: Any,
    *,
    fetches: Any,
    feeds: Callable[[], Mapping[Any, Any]] | Mapping[Any, Any],
    init: Any = None,
    init_feeds: Mapping[Any, Any] | None = None,
    device: str | None = None,
    session_config: Any = None,
) -> Costs:
    """Run a few steps of a training graph in a session of its own and take the times down.

    The step must fit in the device as it is; where it does not, measure a smaller batch of the
    same model, or the graph rewritten with the most saving plan. Times are medians of traced steps;
    where operations run side by side, the time that passes is divided among them, so that all of
    them together take what the step takes. What Grappler folded away takes none, and what it fused
    counts for the operation whose name the kernel has.

    Args:
        graph: the ``tf.Graph``.
        fetches: what a step runs.
        feeds: what it is fed, or a function that returns it.
        init: the operation that initialises the variables.
        init_feeds: what that is fed.
        device: the accelerator; None takes the one that most operations name.
        session_config: a ``ConfigProto``.

    Returns:
        costs for this graph, with ``source="measured"``; ``save`` keeps them.

    Raises:
        GraphError: it is no graph, or empty.
    """
    read = reading.read(graph)
    weights = sizes(read.graph, device=device)
    estimated = static_costs(read.graph, weights)
    compat = tf.compat.v1
    options = compat.RunOptions(trace_level=compat.RunOptions.FULL_TRACE)
    there = {op.name: op.id for op in read.graph.ops() if weights.on_device[op.id]}
    steps: list[dict[str, float]] = []
    workspace = list(estimated.workspace)
    with compat.Session(graph=graph, config=session_config) as session:
        if init is not None:
            session.run(init, init_feeds)
        for step in range(_WARM_UP_STEPS + _TRACED_STEPS):
            fed = feeds() if callable(feeds) else feeds
            if step < _WARM_UP_STEPS:
                session.run(fetches, fed)
                continue
            metadata = compat.RunMetadata()
            session.run(fetches, fed, options=options, run_metadata=metadata)
            steps.append(elapsed.shared(elapsed.spans(metadata.step_stats, there)))
    for device_stats in metadata.step_stats.dev_stats:
        for node in device_stats.node_stats:
            if node.node_name in there:
                workspace[there[node.node_name]] = int(node.memory_stats.temp_memory_size)
    if not any(steps):
        raise GraphError("the traced step shows no operation of the device; are the fetches right?")
    taken = elapsed.medians(steps)
    seconds = list(estimated.seconds)
    for name, op in there.items():
        seconds[op] = taken.get(name, 0.0)
    names = {op.device for op in read.graph.ops() if weights.on_device[op.id] and op.device}
    to_host, to_device = measure_link(min(names)) if names else (None, None)
    return Costs(
        tuple(seconds), tuple(workspace), to_host or estimated.to_host,
        to_device or estimated.to_device, "measured",
    )  # fmt: skip


def measure_link(device: str) -> tuple[float, float]:
    """Copy a probe to a device and back and return bytes per second to the host and to the device.

    The best of a few tries, in a session of its own.
    """
    compat = tf.compat.v1
    probe = tf.Graph()
    with probe.as_default():
        with tf.device(f"/device:{short_device(device)}"):
            start = compat.placeholder(tf.float32, [_PROBE_NBYTES // 4])
            held = compat.get_variable(
                "held", [_PROBE_NBYTES // 4], initializer=compat.zeros_initializer(),
                use_resource=True,
            )  # fmt: skip
            send = held.assign(start, read_value=False)
            value = held.read_value()
        with tf.device("/cpu:0"):
            fetch = tf.identity(value)
        init = compat.global_variables_initializer()
    data = np.zeros(_PROBE_NBYTES // 4, np.float32)
    best_out = best_in = float("inf")
    with compat.Session(graph=probe) as session:
        session.run(init)
        for _ in range(_REPEATS):
            begun = time.perf_counter()
            session.run(send, {start: data})
            sent = time.perf_counter()
            session.run(fetch.op)
            best_in = min(best_in, sent - begun)
            best_out = min(best_out, time.perf_counter() - sent)
    return _PROBE_NBYTES / best_out, _PROBE_NBYTES / best_in
