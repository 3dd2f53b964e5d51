"""Plans by measured costs, and reports that show what was measured, on the emulated accelerator."""

from __future__ import annotations

import pytest

import tflms
from tests.runtime.graphs import SETTINGS, chain
from tests.support.emulated import run_on_emulator

SCRIPT = """
import os, pathlib, tempfile
import tflms
from tflms.commands.report import load
from tflms.runtime import costing
from tflms.runtime.job import start
from tflms.runtime.rewrite import costs_of
from tflms.config import Config
from tflms.zoo import graphs
tf.config.experimental.enable_op_determinism()
build = lambda: graphs.mlp(layers=12, width=512, batch=1024, device=emulator.device)
out = {}

def losses(case, report=None):
    with v1.Session(graph=case.graph) as session:
        session.run(case.init_op)
        feeds = case.feed_dict()
        step = lambda: session.run([case.loss, case.train_op], feeds)
        found = [float(step()[0]) for _ in range(2)]
        if report is not None:
            report.measure(step, steps=2)
        return found

plain = build()
out["plain"] = losses(plain)
for name, limit in (("roomy", None), ("tight", 0.7)):
    case = build()
    before = case.graph.as_graph_def().SerializeToString(deterministic=True)
    config = {"cost": "measured", "batch_size": 1024, "memory_limit": limit}
    job = start(case.graph, Config.of(config), loss=case.loss, fetches=[case.loss, case.train_op])
    costs = costs_of(job)
    same = before == case.graph.as_graph_def().SerializeToString(deterministic=True)
    products = [costs.seconds[op.id] for op in job.graph.ops() if op.type == "MatMul"]
    out[name] = [costs.source, same, max(products), costs.to_host, costs.to_device]
case = build()
report = tflms.rewrite(case.graph, config, loss=case.loss, fetches=[case.loss, case.train_op])
out["mine"] = losses(case, report)
path = os.path.join(tempfile.mkdtemp(), "report.json")
report.save(path)
loaded = load(pathlib.Path(path))
out["report"] = [report.measured, report.predicted_peak_bytes, str(report), str(loaded)]
out["notes"] = report.notes

layers = [tf.Variable(tf.random.stateless_normal([512, 512], [i, 1]) / 30) for i in range(12)]
def step(x):
    with tf.GradientTape() as tape:
        h = x
        for w in layers:
            h = tf.tanh(h @ w)
        loss = tf.reduce_mean(h ** 2)
    for w, g in zip(layers, tape.gradient(loss, layers)):
        w.assign_sub(0.1 * g)
    return loss
x = tf.random.stateless_normal([1024, 512], [1, 2])
start_values = [w.numpy() for w in layers]
def trained(run):
    for w, value in zip(layers, start_values):
        w.assign(value)
    return [float(run(x)) for _ in range(2)]
mine = tflms.function(step, {"memory_limit": 0.7, "cost": "measured"})
found = trained(mine)
out["function"] = [trained(tf.function(step)), found, mine.report().notes]
out["function measured"] = mine.report().measure(lambda: mine(x).numpy())
other = tf.ones([2 ** 20])
out["beside others"] = mine.report().measure(lambda: mine(x).numpy())
result = out
"""


def test_costs_are_measured_on_a_copy_and_reports_show_what_is_measured():
    found = run_on_emulator(SCRIPT, memory_bytes="600MB")
    source, same, longest, to_host, to_device = found["roomy"]
    assert source == "measured, on the step as it is, with made-up data"
    assert same
    assert longest > 1e-4
    assert min(to_host, to_device) > 1e8
    assert "all swapped" in found["tight"][0]
    assert found["tight"][2] > 1e-4
    assert found["mine"] == found["plain"]
    measured, predicted, told, loaded = found["report"]
    assert abs(measured["peak_bytes"] / predicted - 1) <= 0.05
    assert measured["step_seconds"] > 0
    assert measured["to_host_bytes"] > 2**20
    for text in (told, loaded):
        assert "peak (measured)" in text
        assert "step (measured)" in text
        assert "the prediction is off by" in text
    assert any("costs were measured" in note for note in found["notes"])
    plain, mine, notes = found["function"]
    assert mine == plain
    assert any("costs were measured" in note for note in notes)
    alone, beside = found["function measured"], found["beside others"]
    assert alone["peak_bytes"] > alone["held_bytes"] > 12 * 4 * 512 * 512
    for figure in ("held_bytes", "peak_bytes"):  # the other tensor is no part of the step
        assert abs(beside[figure] - alone[figure] - 4 * 2**20) < 2**20


def test_a_step_that_cannot_be_run_apart_is_refused_and_left_as_it_was():
    graph, _, loss, train = chain()
    before = graph.as_graph_def()
    with pytest.raises(tflms.ConfigError, match="set batch_size"):
        tflms.rewrite(
            graph, {"strategy": "optimal_checkpointing", "memory_limit": 0.9, "cost": "measured",
                    "min_swap_bytes": 0}, loss=loss, fetches=[train],
        )  # fmt: skip
    assert graph.as_graph_def() == before


def test_a_device_without_a_peak_cannot_be_measured():
    graph, _, loss, train = chain()
    report = tflms.rewrite(graph, SETTINGS, loss=loss, fetches=[train])
    with pytest.raises(tflms.TflmsError, match="keeps no peak"):
        report.measure(lambda: None)
    with pytest.raises(tflms.ConfigError, match="at least 1"):
        report.measure(lambda: None, steps=0)
