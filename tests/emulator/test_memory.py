"""The device's memory: it runs out, it waits, it peaks and it comes back, as a real one does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.emulated import run_on_emulator

MB = 2**20


@pytest.fixture(scope="module")
def small() -> Any:
    """What happens in a memory of 64 MiB."""
    return run_on_emulator(
        """
        import gc, threading, time
        from tensorflow.core.protobuf import rewriter_config_pb2

        def session_of(graph):
            config = v1.ConfigProto()  # folded constants would leave nothing to compute
            options = config.graph_options.rewrite_options
            options.constant_folding = rewriter_config_pb2.RewriterConfig.OFF
            return v1.Session(graph=graph, config=config)

        def failure(run):
            start = time.monotonic()
            try:
                run()
            except tf.errors.ResourceExhaustedError as error:
                return {"message": str(error), "seconds": time.monotonic() - start}

        result = {}
        tf.ones([8])  # makes the constants that the eager runtime keeps
        gc.collect()
        at_start = emulator.stats().bytes_in_use
        result["hopeless"] = failure(lambda: tf.ones([100 * MB]))
        result["full"] = failure(lambda: [tf.ones([2 * MB]) for _ in range(9)])
        gc.collect()
        result["after failures"] = emulator.stats().bytes_in_use - at_start

        # A chain whose values are all needed at the end: 80 MiB.
        with tf.Graph().as_default() as deep:
            values = [v1.placeholder(tf.float32, [2 * MB])]
            for _ in range(9):
                values.append(tf.sin(values[-1]))
            total = tf.reduce_sum(tf.add_n(values))
        with session_of(deep) as session:
            feed = {values[0]: np.ones(2 * MB, "f")}
            result["session"] = failure(lambda: session.run(total, feed))
            result["after session"] = emulator.stats().bytes_in_use - at_start
            short = values[3]
            value = session.run(short, feed)[0]
            result["goes on"] = [float(value), float(np.sin(np.sin(np.sin(np.float32(1)))))]

        # 96 MiB pass through 64 MiB: an allocation waits for the copies that free memory.
        with tf.Graph().as_default() as stream:
            parked, last = [], None
            for i in range(12):
                with tf.control_dependencies([last] if last is not None else []):
                    x = tf.random.stateless_uniform([2 * MB], [i, 1])
                with tf.device("/cpu:0"):
                    parked.append(tf.reduce_max(tf.identity(x)))
                last = x.op
        emulator.set_link(to_host=200 * MB)
        emulator.reset_stats()
        with session_of(stream) as session:
            result["streamed"] = [float(v) for v in session.run(parked)]
        emulator.set_link()
        result["stream"] = emulator.stats()

        # A constant too large for the device.
        with tf.Graph().as_default() as constant:
            big = tf.constant(np.arange(20 * MB, dtype="f")) + 1.0
        with session_of(constant) as session:
            result["constant"] = failure(lambda: session.run(big))

        # Many sessions, one after another and at once.
        with tf.Graph().as_default() as counting:
            counter = v1.get_variable("counter", [MB // 4], initializer=v1.zeros_initializer())
            step = tf.reduce_max(v1.assign_add(counter, tf.ones([MB // 4])))
            init = v1.global_variables_initializer()
        left = []
        for _ in range(10):
            with session_of(counting) as session:
                session.run(init)
                session.run(step)
                during = emulator.stats().bytes_in_use - at_start
            left.append(emulator.stats().bytes_in_use - at_start)
        result["session holds"], result["sessions leave"] = during, left

        sessions = [session_of(counting) for _ in range(4)]
        counts = [0.0] * 4
        def work(i):
            sessions[i].run(init)
            for _ in range(30):
                counts[i] = float(sessions[i].run(step))
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        result["counts"] = counts
        for session in sessions: session.close()
        del sessions, session
        gc.collect()
        result["after threads"] = emulator.stats().bytes_in_use - at_start

        # The peak counts from reset_stats().
        held = tf.ones([MB])
        temporary = tf.ones([4 * MB])
        del temporary
        result["peak before"] = emulator.stats()
        emulator.reset_stats()
        result["peak after"] = emulator.stats()
        del held
        """,
        memory_bytes=64 * MB,
        MB=MB,
    )


def test_what_can_never_fit_fails_at_once(small: Any) -> None:
    assert "OOM when allocating tensor with shape[104857600]" in small["hopeless"]["message"]
    assert "device:EMU:0 by allocator EMU_0_bfc" in small["hopeless"]["message"]
    assert small["hopeless"]["seconds"] < 0.9  # sooner than it would if it waited


def test_a_full_memory_fails_after_nothing_has_moved_for_a_second(small: Any) -> None:
    assert "OOM when allocating tensor with shape[2097152]" in small["full"]["message"]
    assert 1.0 <= small["full"]["seconds"] < 9.0
    assert small["after failures"] == 0


def test_a_session_that_runs_out_fails_and_can_go_on(small: Any) -> None:
    assert "OOM when allocating tensor" in small["session"]["message"]
    assert small["after session"] < MB  # constants of the session
    got, wanted = small["goes on"]
    assert got == pytest.approx(wanted, rel=1e-6)


def test_an_allocation_waits_for_copies_that_are_under_way(small: Any) -> None:
    assert small["stream"]["to_host_bytes"] >= 96 * MB > small["stream"]["limit_bytes"]
    assert small["stream"]["peak_bytes"] <= small["stream"]["limit_bytes"]
    assert all(0.999 < value < 1.0 for value in small["streamed"])


def test_a_constant_too_large_for_the_device_runs_it_out(small: Any) -> None:
    assert "OOM when allocating" in small["constant"]["message"]


def test_sessions_give_their_memory_back(small: Any) -> None:
    assert small["session holds"] >= MB
    assert small["sessions leave"] == [0] * 10
    assert small["after threads"] == 0


def test_sessions_at_once_do_not_disturb_each_other(small: Any) -> None:
    assert small["counts"] == [30.0] * 4


def test_the_peak_counts_from_the_last_reset(small: Any) -> None:
    before, after = small["peak before"], small["peak after"]
    assert before["peak_bytes"] >= 20 * MB
    assert after["peak_bytes"] == after["bytes_in_use"] == before["bytes_in_use"]
    assert 4 * MB <= after["peak_bytes"] < 20 * MB


# Layers of 512 units, batch 2048: a value is 4 MiB. Swapped by hand, each activation leaves the
# device and comes back when the gradient two layers above starts.
_MLP = """
import time
from tensorflow.core.framework import attr_value_pb2

tf.config.experimental.enable_op_determinism()

def train(swapped):
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 512])
        h, activations = x, []
        for i in range(30):
            start = v1.random_normal_initializer(stddev=0.05, seed=i)
            w = v1.get_variable(f"w{i}", [512, 512], initializer=start, use_resource=True)
            h = tf.nn.relu(tf.matmul(h, w))
            activations.append(h)
        loss = tf.reduce_mean(h)
        forward = set(graph.get_operations())
        step = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        init = v1.global_variables_initializer()
        def late(value):
            return [op for op in value.consumers() if op not in forward]
        if swapped:
            for i, value in enumerate(activations[:-2]):
                consumers = late(value)
                with tf.device("/cpu:0"):
                    parked = tf.identity(value)
                    back = tf.identity(parked)
                for op in (parked.op, back.op):
                    op._set_attr("_grappler_do_not_remove", attr_value_pb2.AttrValue(b=True))
                back.op._add_control_input(late(activations[min(i + 3, 29)])[0])
                for op in consumers:
                    for slot, tensor in enumerate(op.inputs):
                        if tensor is value:
                            op._update_input(slot, back)
    losses, peaks = [], []
    with v1.Session(graph=graph) as session:
        session.run(init)
        batch = np.random.RandomState(0).randn(2048, 512).astype("f")
        for _ in range(4):
            emulator.reset_stats()
            losses.append(float(session.run([loss, step], {x: batch})[0]))
            peaks.append(emulator.stats().peak_bytes)
        moved = emulator.stats()
    return {"losses": losses, "peak": min(peaks[1:]), "moved": moved}

result = {"plain": train(False), "swapped": train(True), "left": emulator.stats().bytes_in_use}
"""


@pytest.fixture(scope="module")
def mlp() -> Any:
    return run_on_emulator(_MLP, memory_bytes="400MB")


def test_a_deep_network_needs_the_memory_that_its_activations_need(mlp: Any) -> None:
    # 30 weights of 1 MiB, 30 activations, the batch, and gradients of one layer at a time.
    at_least = 30 * MB + 31 * 4 * MB
    assert at_least <= mlp["plain"]["peak"] <= 172e6


def test_swapping_by_hand_lowers_the_peak_at_the_same_losses(mlp: Any) -> None:
    assert mlp["swapped"]["peak"] <= 70e6
    assert mlp["swapped"]["losses"] == mlp["plain"]["losses"]
    assert mlp["swapped"]["moved"]["to_host_bytes"] >= 28 * 4 * MB
    assert mlp["swapped"]["moved"]["to_device_bytes"] >= 28 * 4 * MB
    assert mlp["left"] == 0
