"""auto computes again what is cheap where a link is slow: less is moved, and no number changes."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import tflms
from tests.support.emulated import run_on_emulator
from tflms.config import Config
from tflms.planning.cost import static_costs
from tflms.runtime.job import start

v1 = tf.compat.v1
BLOCKS = 6
BATCH = 16
BYTES_A_SECOND = 2e8  # of the link: far too slow to hide behind these layers


@dataclasses.dataclass
class Step:
    """A small residual network with normalization, in a graph of its own."""

    graph: tf.Graph
    loss: tf.Tensor
    train: tf.Operation
    x: tf.Tensor

    @property
    def arguments(self):
        return {"loss": self.loss, "fetches": [self.loss, self.train]}

    def run(self, steps=3):
        """The losses and all variables after some steps."""
        data = np.random.default_rng(0).standard_normal((BATCH, 24, 24, 8)).astype("f")
        with self.graph.as_default(), v1.Session(graph=self.graph) as session:
            session.run(v1.global_variables_initializer())
            losses = [session.run([self.loss, self.train], {self.x: data})[0] for _ in range(steps)]
            return [*losses, *session.run(v1.global_variables())]


def build(device="/device:CPU:0"):
    graph = tf.Graph()
    with graph.as_default(), tf.device(device):
        random = np.random.default_rng(1)
        x = v1.placeholder(tf.float32, [BATCH, 24, 24, 8], name="x")
        moving = []
        h = x
        for i in range(BLOCKS):
            kernel = (random.standard_normal((3, 3, 8, 8)) * 0.1).astype("f")
            w = v1.get_variable(f"w{i}", initializer=kernel, use_resource=True)
            one = v1.get_variable(f"s{i}", initializer=np.ones(8, "f"), use_resource=True)
            zero = v1.get_variable(f"o{i}", initializer=np.zeros(8, "f"), use_resource=True)
            mean = v1.get_variable(
                f"m{i}", initializer=np.zeros(8, "f"), use_resource=True, trainable=False
            )
            c = tf.nn.conv2d(h, w, 1, "SAME", name=f"c{i}")
            n, batch_mean, _ = v1.nn.fused_batch_norm(c, one, zero, name=f"n{i}")
            moving.append(v1.assign_sub(mean, 0.1 * (mean - batch_mean)))
            h = tf.nn.relu(n + h if i % 2 else n, name=f"r{i}")
        loss = tf.reduce_mean(h**2)
        step = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        train = tf.group(step, *moving)
    return Step(graph, loss, train, x)


@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    """A file of costs with a slow link."""
    return slow_link(build(), str(tmp_path_factory.mktemp("costs") / "costs.json"))


def slow_link(step, path):
    """Write estimated costs of a step with a slow link to a file, and return its path."""
    job = start(step.graph, Config(strategy="none"), **step.arguments)
    slow = dataclasses.replace(
        static_costs(job.graph, job.weights()), to_host=BYTES_A_SECOND, to_device=BYTES_A_SECOND
    )
    slow.save(path)
    return path


def config(costs, **more):
    return {"memory_limit": 0.6, "min_swap_bytes": 1024, "cost": costs, **more}


def test_what_is_cheap_is_computed_again_where_the_link_is_slow(costs):
    step = build()
    mixed = tflms.plan(step.graph, config(costs), **step.arguments)
    moved = tflms.plan(step.graph, config(costs, recompute=False), **step.arguments)
    report = tflms.rewrite(step.graph, config(costs), **step.arguments)
    again = {one.op for one in report.recomputes}
    assert {"n2", "r2"} <= again  # a normalization and what it feeds
    assert not any(op.startswith("c") for op in again)  # Grappler might fuse those that stay
    assert report.swaps
    assert mixed.moved_bytes < moved.moved_bytes
    assert mixed.predicted_seconds < moved.predicted_seconds
    assert mixed.plain_seconds == pytest.approx(moved.plain_seconds)
    assert "is recomputed when" in report.why("r2")


def test_auto_swaps_only_where_it_may_not_recompute(costs):
    step = build()
    report = tflms.rewrite(step.graph, config(costs, recompute=False), **step.arguments)
    assert report.swaps and not report.recomputes


def test_numbers_stay_bit_for_bit_and_statistics_move_once(costs):
    plain = build().run()
    step = build()
    report = tflms.rewrite(step.graph, config(costs), **step.arguments)
    assert report.recomputes
    assert [a.tobytes() for a in step.run()] == [b.tobytes() for b in plain]


ON_EMULATOR = """
from tests.strategies import test_again as t
import tflms
tf.config.experimental.enable_op_determinism()
plain = t.build(emulator.device).run()
step = t.build(emulator.device)
report = tflms.rewrite(step.graph, t.config(t.slow_link(step, path)), **step.arguments)
ran = [a.tobytes() == b.tobytes() for a, b in zip(step.run(), plain, strict=True)]
result = {"again": sorted({one.op for one in report.recomputes}), "equal": all(ran)}
"""


def test_on_an_accelerator_convolutions_and_what_reads_them_are_computed_again_bit_for_bit(
    tmp_path,
):
    found = run_on_emulator(ON_EMULATOR, path=str(tmp_path / "costs.json"))
    assert found["equal"]
    again = set(found["again"])
    assert {"c2", "n2", "r2"} <= again  # each reads what was computed again before it


def test_a_saved_plan_computes_again_what_the_plan_says(costs, tmp_path):
    step = build()
    plan = tflms.plan(step.graph, config(costs), **step.arguments)
    plan.save(tmp_path / "plan.json")
    direct = tflms.rewrite(step.graph, config(costs), **step.arguments)
    other = build()
    played = tflms.rewrite(other.graph, plan=tflms.Plan.load(tmp_path / "plan.json"))
    assert {one.op for one in played.recomputes} == {one.op for one in direct.recomputes}
    assert played.predicted_peak_bytes == direct.predicted_peak_bytes
    assert played.verify().ok


def test_a_fast_link_leaves_nothing_to_compute_again():
    step = build()
    report = tflms.rewrite(
        step.graph, {"memory_limit": 0.6, "min_swap_bytes": 1024}, **step.arguments
    )
    assert report.swaps and not report.recomputes


def test_a_plan_that_is_played_is_predicted_to_take_what_it_was_when_it_was_made():
    step, other = build(), build()
    fast = {"memory_limit": 0.6, "min_swap_bytes": 1024}
    plan = tflms.plan(step.graph, fast, **step.arguments)
    played = tflms.rewrite(other.graph, plan=plan)
    assert played.predicted_seconds == plan.predicted_seconds
    assert played.plain_seconds == plan.plain_seconds
