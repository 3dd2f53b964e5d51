"""What a step may need while nothing fixes its order: the orders that an executor may take."""

from __future__ import annotations

import tensorflow as tf

import tflms
from tflms.config import Config
from tflms.graph import text
from tflms.planning import cost
from tflms.planning.executor import executor_order, orders_left, possible_orders
from tflms.planning.simulate import Replay
from tflms.planning.unordered import over, unordered
from tflms.runtime import rewrite
from tflms.runtime.job import start
from tflms.zoo import graphs

WIDE = 16384  # bytes of an activation
LAYERS = 6


def step():
    """Forward and backward through a chain; each weight's gradient ends an activation."""
    lines = ["a0 = Placeholder() : f32[4096]"]
    lines += [f"a{i + 1} = Cumsum(a{i}) : f32[4096]" for i in range(LAYERS)]
    lines += [f"loss = Sum(a{LAYERS}) : f32[]", f"g{LAYERS} = Fill(loss) : f32[4096]"]
    for i in reversed(range(LAYERS)):
        lines.append(f"w{i} = BatchMatMul(g{i + 1}, a{i}) : f32[]")
        lines.append(f"g{i} = Cumprod(g{i + 1}) : f32[4096]")
    graph = text.parse("\n".join(f"{line} @/device:EMU:0" for line in lines))
    return graph, {op.id for op in graph.ops()}


def replayed(graph, within):
    weights = cost.sizes(graph)
    return Replay(graph, weights, within, cost.static_costs(graph, weights))


def test_possible_orders_keep_all_edges_and_let_gradients_of_weights_fall_behind():
    graph, within = step()
    orders = possible_orders(graph, within)
    assert orders[0] == executor_order(graph, within)
    for found in orders:
        place = {op: at for at, op in enumerate(found)}
        assert set(found) == within
        assert all(place[p] < place[op] for op in within for p in graph.predecessors(op))
    last = [graph.op(op).name for op in orders[-1][-LAYERS:]]
    assert {name[0] for name in last[:-1]} == {"w"}


def test_a_step_fits_only_where_it_fits_in_every_order():
    graph, within = step()
    replay = replayed(graph, within)
    first = replay.run(executor_order(graph, within)).peak_bytes
    most = unordered(graph, replay, within, first, waste=1 << 16).most_bytes
    # behind the chain of gradients all activations and all gradients are alive at once
    assert most >= 2 * LAYERS * WIDE > first
    assert not unordered(graph, replay, within, first, waste=1 << 16).fits
    assert not unordered(graph, replay, within, most - 1, waste=1 << 16).fits
    assert unordered(graph, replay, within, most + 3 * WIDE, waste=1 << 16).fits


def rewritten(limit, **config):
    case = graphs.unet3d(size=16, filters=4)
    before = case.graph.as_graph_def().SerializeToString(deterministic=True)
    report = tflms.rewrite(
        case.graph, {"memory_limit": limit, **config}, loss=case.loss,
        fetches=[case.loss, case.train_op],
    )  # fmt: skip
    after = case.graph.as_graph_def().SerializeToString(deterministic=True)
    assert report.changed == (before != after)
    return report


def test_a_limit_just_above_the_plain_peak_fixes_the_order_and_one_well_above_changes_nothing():
    plain = rewritten("1GB")
    assert not plain.changed
    assert plain.notes[0].startswith("nothing was changed: the step needs")
    limit = int(1.01 * plain.plain_peak_bytes)
    report = rewritten(limit)
    assert report.changed
    assert report.orders
    assert report.predicted_peak_bytes <= limit
    assert "where the executor runs it in another order: its order is fixed" in report.notes[0]
    assert report.verify().ok
    assert rewritten(1.0).changed  # of the predicted peak, which the executor may exceed


def test_schedules_are_followed_where_the_step_may_need_more_than_the_limit_as_it_is():
    plain = rewritten("1GB").plain_peak_bytes
    report = rewritten(int(1.05 * plain), strategy="optimal_checkpointing")
    assert report.recomputes
    assert "where the executor runs it in another order" in report.notes[-1]


def test_what_nothing_waits_for_holds_what_it_reads_until_something_does():
    lines = ["x = Placeholder() : f32[]", "a = Fill(x) : f32[4096]", "side = Cumsum(a) : f32[4096]"]
    lines += ["b = Cumprod(a) : f32[4096]", "c = Cumprod(b) : f32[4096]"]
    lines += ["d = Cumprod(c) : f32[4096]", "end = Select(side, d) : f32[]"]
    graph = text.parse("\n".join(f"{line} @/device:EMU:0" for line in lines))
    within = {op.id for op in graph.ops()}
    replay, order = replayed(graph, within), [op.id for op in graph.ops()]
    small = replay.run(order).peak_bytes - 3 * WIDE
    assert small < WIDE  # a is gone when c is made from b, with side kept
    assert replay.crowded_peak(order) == 4 * WIDE + small  # side still reads a
    side = text.op_named(graph, "side")
    assert replay.crowded_peak(order, [side]) == 3 * WIDE + small


def test_what_a_kernel_does_in_passing_comes_in_no_order_late():
    lines = ["x = Placeholder() : f32[]", "g0 = Fill(x) : f32[4096]"]
    for i in range(LAYERS):
        lines += [f"w{i} = BatchMatMul(g{i}, g{i}) : f32[]", f"b{i} = Sum(g{i}) : f32[]"]
        lines.append(f"g{i + 1} = Cumprod(g{i}) : f32[4096] @/device:EMU:0 after w{i}")
    text_of = [one if "@" in one else f"{one} @/device:EMU:0" for one in lines]
    graph = text.parse("\n".join(text_of))
    within, order = {op.id for op in graph.ops()}, [op.id for op in graph.ops()]
    replay, named = replayed(graph, within), lambda name: text.op_named(graph, name)
    limit = replay.run(order).peak_bytes
    merged = {named(f"b{i}"): named(f"w{i}") for i in range(LAYERS)}
    assert over(graph, replay, within, order, limit, merged) is None
    assert over(graph, replay, within, order, limit, {}) > limit + WIDE


def with_a_loss_in_the_middle():
    """A step in which no edge may touch the square of an activation, nor its gradient."""
    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default(), tf.device("/device:EMU:0"):
        values = [v1.placeholder(tf.float32, (16, 24, 24, 16))]
        for layer in range(5):
            kernel = v1.get_variable(f"kernel{layer}", (3, 3, 16, 16))
            scale = v1.get_variable(f"scale{layer}", (16,))
            made = tf.nn.conv2d(values[-1], kernel, 1, "SAME") + scale
            made, *_ = v1.nn.fused_batch_norm(made, scale, scale)
            values.append(tf.nn.relu(made + values[-1]))
        loss = tf.reduce_mean(values[-1]) + 0.3 * tf.reduce_mean(tf.square(values[3]))
        train = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
    return graph, loss, [loss, train]


def test_a_plan_keeps_its_limit_in_all_orders_that_its_edges_leave():
    for fraction in (0.75, 0.7):
        graph, loss, fetches = with_a_loss_in_the_middle()
        config = Config.of({"memory_limit": fraction, "min_swap_bytes": 1024})
        job = start(graph, config, loss=loss, fetches=fetches)
        outcome = rewrite.propose(job).outcome
        within = set(outcome.timeline.order)
        replay = Replay(job.graph, job.weights(), within, rewrite.costs_of(job))
        orders = list(orders_left(job.graph, within))
        peaks = [replay.crowded_peak(order) for order in orders]
        assert len({tuple(order) for order in orders}) > 3
        assert max(peaks) <= 1.02 * fraction * job.before.peak_bytes
