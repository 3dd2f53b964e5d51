"""The link: copies are counted, take their time, hold their source and block nobody."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.emulated import run_on_emulator

MB = 2**20


@pytest.fixture(scope="module")
def copies() -> Any:
    return run_on_emulator(
        """
        import time
        from tensorflow.core.protobuf import rewriter_config_pb2

        def session_of(graph):
            config = v1.ConfigProto()
            options = config.graph_options.rewrite_options
            options.constant_folding = rewriter_config_pb2.RewriterConfig.OFF
            return v1.Session(graph=graph, config=config)

        result = {}
        with tf.device(emulator.device):
            x = tf.ones([4 * MB])

        # One copy each way, eagerly, with rates.
        emulator.set_link(to_host=100 * MB, to_device=50 * MB)
        emulator.reset_stats()
        start = time.monotonic()
        value = x.numpy()
        result["out seconds"] = time.monotonic() - start
        result["out"] = emulator.stats()
        with tf.device("/cpu:0"):
            y = tf.ones([4 * MB]) * 3
        emulator.reset_stats()
        start = time.monotonic()
        with tf.device(emulator.device):
            total = tf.reduce_sum(y)
        result["in seconds"] = time.monotonic() - start
        result["in"] = emulator.stats()
        result["values"] = [float(value.sum()), float(total)]
        emulator.set_link()
        del x, y, total

        # Ten copies in a row take what their bytes take together.
        with tf.Graph().as_default() as graph:
            with tf.device(emulator.device):
                xs = [tf.random.stateless_uniform([MB // 4], [i, 1]) for i in range(10)]
        emulator.set_link(to_host=20 * MB)
        with session_of(graph) as session:
            session.run(xs[0])
            emulator.reset_stats()
            session.run(xs)
        result["row"] = emulator.stats()

        # Four copies queue for a second in all; meanwhile the device computes on, and fills what
        # memory it can get with other values.
        with tf.Graph().as_default() as graph:
            with tf.device(emulator.device):
                starts = [v1.placeholder(tf.float32, []) for _ in range(4)]
                sources = [tf.fill([MB], start) for start in starts]
                with tf.device("/cpu:0"):
                    parked = [tf.identity(s, name=f"parked{i}") for i, s in enumerate(sources)]
                    read = [tf.reduce_min(p) for p in parked] + [tf.reduce_max(p) for p in parked]
                with tf.control_dependencies(sources):
                    busy = tf.random.stateless_uniform([512, 512], [1, 2])
                for _ in range(6):
                    busy = tf.matmul(busy, busy) / 512.0
                filler = tf.reduce_max(busy) + 100.0
                fillers = [tf.fill([MB], filler + float(i)) for i in range(24)]
                done = tf.identity(tf.add_n(fillers), name="done")
        emulator.set_link(to_host=16 * MB)
        trace = v1.RunMetadata()
        with session_of(graph) as session:
            values, _ = session.run(
                [read, done.op], dict(zip(starts, [0.0, 1.0, 2.0, 3.0])),
                options=v1.RunOptions(trace_level=3), run_metadata=trace
            )
        emulator.set_link()
        ends = {}
        for device in trace.step_stats.dev_stats:
            for node in device.node_stats:
                ends[node.node_name] = node.all_start_micros + node.all_end_rel_micros
        result["held"] = [float(v) for v in values]
        result["lead"] = 1e-6 * (max(ends[f"parked{i}"] for i in range(4)) - ends["done"])

        # Both directions work at once: a value goes out while another comes in.
        with tf.Graph().as_default() as graph:
            with tf.device(emulator.device):
                out = tf.random.stateless_uniform([MB], [1, 1])
            with tf.device("/cpu:0"):
                inward = tf.random.stateless_uniform([MB], [2, 2])
                outward = tf.reduce_max(tf.identity(out))
            with tf.device(emulator.device):
                arrived = tf.reduce_max(tf.identity(inward))
        emulator.set_link(emulator.Link(to_host=8 * MB, to_device=8 * MB))
        with session_of(graph) as session:
            emulator.reset_stats()
            start = time.monotonic()
            result["greatest"] = session.run([outward, arrived])
            result["both seconds"] = time.monotonic() - start
            result["both"] = emulator.stats()
        emulator.set_link()
        """,
        memory_bytes=128 * MB,
        MB=MB,
    )


def test_a_copy_takes_its_bytes_divided_by_the_rate(copies: Any) -> None:
    assert 0.16 <= copies["out seconds"] < 0.8
    assert copies["out"]["to_host_seconds"] == pytest.approx(0.16, rel=0.2)
    assert 0.32 <= copies["in seconds"] < 1.0
    assert copies["in"]["to_device_seconds"] == pytest.approx(0.32, rel=0.2)


def test_bytes_and_copies_are_counted_by_direction(copies: Any) -> None:
    out, into = copies["out"], copies["in"]
    assert (out["to_host_bytes"], out["to_host_copies"]) == (16 * MB, 1)
    assert (out["to_device_bytes"], out["to_device_copies"]) == (0, 0)
    assert into["to_device_bytes"] >= 16 * MB
    assert into["to_host_bytes"] < 100
    assert copies["values"] == [4.0 * MB, 12.0 * MB]


def test_copies_in_a_row_take_what_their_bytes_take_together(copies: Any) -> None:
    assert copies["row"]["to_host_copies"] == 10
    assert copies["row"]["to_host_seconds"] == pytest.approx(0.5, rel=0.1)


def test_a_copy_that_queues_keeps_its_source(copies: Any) -> None:
    assert copies["held"] == [0.0, 1.0, 2.0, 3.0] * 2


def test_the_device_computes_on_while_a_copy_is_under_way(copies: Any) -> None:
    assert copies["lead"] > 0.1


def test_the_directions_do_not_wait_for_each_other(copies: Any) -> None:
    both = copies["both"]
    assert all(0.999 < value < 1.0 for value in copies["greatest"])
    assert both["to_host_seconds"] + both["to_device_seconds"] > 0.95
    assert copies["both seconds"] < 0.9
