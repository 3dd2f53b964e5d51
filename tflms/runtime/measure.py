"""Measures what a step costs: seconds and workspaces per operation, and the rates of the link."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tflms.emulator import accelerator
from tflms.errors import GraphError, TflmsError
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
    device: str | None = None,
    link_device: str | None = None,
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
        device: the accelerator; None takes the one that most operations name.
        link_device: whose link is measured where no operation names a device.
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
            session.run(init)
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
    linked = min(names, default=link_device or "")
    on_host = not linked or short_device(linked).startswith("CPU")
    to_host, to_device = (None, None) if on_host else measure_link(linked)
    return Costs(
        tuple(seconds), tuple(workspace), to_host or estimated.to_host,
        to_device or estimated.to_device, "measured",
    )  # fmt: skip


def measure_steps(device: str, step: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Run a step once, then some more times, and return the device's peak and the median time.

    Args:
        device: whose peak it is.
        step: runs one step and waits for its end.
        steps: how many count.

    Returns:
        ``peak_bytes`` and ``step_seconds``; ``held_bytes``, which was in use before the steps:
        variables, and what else lies on the device; on the emulated accelerator also
        ``to_host_bytes`` and ``to_device_bytes`` of a step.

    Raises:
        TflmsError: TensorFlow keeps no peak for such a device.
    """
    name = short_device(device)
    memory = tf.config.experimental
    if not name or name.startswith("CPU"):
        raise TflmsError(
            f"TensorFlow keeps no peak of {name or 'the CPU'}; run the step on a GPU, or on the "
            "emulated accelerator (tflms.emulator.load)"
        )
    step()
    held = int(memory.get_memory_info(name)["current"])
    emulated = accelerator.is_loaded() and name == short_device(accelerator.device)
    memory.reset_memory_stats(name)
    if emulated:
        accelerator.reset_stats()
    seconds = []
    for _ in range(steps):
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    found: dict[str, Any] = {"held_bytes": held, "step_seconds": statistics.median(seconds)}
    if emulated:
        now = accelerator.stats()
        found |= {
            "peak_bytes": now.peak_bytes,
            "to_host_bytes": now.to_host_bytes // steps,
            "to_device_bytes": now.to_device_bytes // steps,
        }
    else:
        found["peak_bytes"] = int(memory.get_memory_info(name)["peak"])
    return dict(sorted(found.items()))


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
