"""The report: is the rewrite on, what was decided and why, as text and as JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import rewriter_config_pb2

import tflms
from tests.runtime.graphs import SETTINGS, chain, v1
from tflms.errors import GraphError, TflmsError
from tflms.runtime import survival


def rewritten(**arguments):
    graph, x, loss, train = chain()
    return tflms.rewrite(graph, SETTINGS, loss=loss, fetches=[train], **arguments), graph, x, train


def run_once(graph, x, train):
    """Partition graphs of a real run, through the optimizers that a session has by default."""
    metadata = v1.RunMetadata()
    with graph.as_default(), v1.Session(graph=graph) as session:
        session.run(v1.global_variables_initializer())
        session.run(
            train,
            {x: np.ones([2, 8], "f")},
            options=v1.RunOptions(output_partition_graphs=True),
            run_metadata=metadata,
        )
    return metadata


def test_a_defended_rewrite_survives_the_optimizers():
    report, graph, x, train = rewritten()
    found = report.verify()
    assert found.ok
    assert found.expected == found.survived == report.inserted_ops > 0
    assert found.missing == ()
    assert report.survival == found
    assert f"{found.survived} of {found.expected} inserted operations" in str(report)
    assert survival.check_run(report.inserted_names, run_once(graph, x, train)).ok


def test_an_undefended_rewrite_is_caught():
    report, graph, x, train = rewritten(keep=False)
    assert report.inserted_ops > 0
    found = report.verify()
    assert not found.ok
    assert found.survived < found.expected
    assert set(found.missing) <= set(report.inserted_names)
    real = survival.check_run(report.inserted_names, run_once(graph, x, train))
    assert not real.ok


def test_an_undefended_rewrite_survives_where_the_optimizers_are_off():
    report, *_ = rewritten(keep=False)
    config = v1.ConfigProto()
    options = config.graph_options.rewrite_options
    options.disable_meta_optimizer = True
    options.constant_folding = rewriter_config_pb2.RewriterConfig.OFF
    assert report.verify(config).ok
    assert not report.verify().ok


def test_a_report_of_nothing_has_nothing_to_verify():
    graph, _, loss, train = chain()
    report = tflms.rewrite(graph, {"n_tensors": 0}, loss=loss, fetches=[train])
    with pytest.raises(TflmsError, match="nothing was changed"):
        report.verify()


def test_the_json_form_is_plain_and_stable():
    one, *_ = rewritten()
    two, *_ = rewritten()
    first, second = json.loads(one.to_json()), json.loads(two.to_json())
    assert list(first) == list(second)
    for data in (first, second):
        assert data.pop("seconds") > 0
    assert first == second
    assert first["format"] == 1
    assert first["strategy"] == "direct_order"
    assert first["config"]["min_swap_bytes"] == 0
    assert len(first["swaps"]) == len(one.swaps)
    assert first["swaps"][0]["swap_out"] == one.swaps[0].swap_out
    assert first["inserted_ops"] == one.inserted_ops
    assert first["graph_ops"] + first["inserted_ops"] > first["levels"]


def test_it_is_saved_to_a_file(tmp_path):
    report, *_ = rewritten()
    report.save(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == report.to_dict()


def test_it_is_readable_when_printed():
    report, *_ = rewritten()
    shown = str(report)
    assert "tflms: direct_order" in shown
    assert f"{len(report.swaps)} values" in shown
    assert "peak (predicted)" in shown
    assert all(len(line) <= 100 for line in shown.splitlines())


def test_sizes_are_told_apart_from_unknown_ones():
    graph, _, loss, train = chain()
    report = tflms.rewrite(graph, {**SETTINGS, "batch_size": 64}, loss=loss, fetches=[train])
    sizes = {swap.value: swap.nbytes for swap in report.swaps}
    assert sizes["net/layer0/act"] == 64 * 8 * 4
    assert report.moved_bytes >= 5 * 64 * 8 * 4
    assert report.predicted_peak_bytes <= report.plain_peak_bytes


def test_why_tells_of_each_operation_what_was_decided():
    report, graph, _, _ = rewritten()
    why = report.why("net/layer1/act")
    assert why.startswith("net/layer1/act (")
    assert "is swapped" in why
    assert "comes back for" in why
    assert report.why("net/layer1/act:0") == why
    assert report.why(report.swaps[0].swap_out).startswith(report.swaps[0].value)
    assert "from variables alone" in report.why("net/layer1/w/Read/ReadVariableOp") or (
        "does not run it" in report.why("net/layer1/w/Read/ReadVariableOp")
    )
    assert "stay on the device" in report.why("x")
    for op in graph.get_operations():
        assert report.why(op.name)
        for tensor in op.outputs:
            assert report.why(tensor.name)


def test_why_knows_nothing_of_strangers():
    report, *_ = rewritten()
    with pytest.raises(GraphError, match="no operation 'nobody'"):
        report.why("nobody")
    with pytest.raises(GraphError, match="no operation 'net/layer1/act:7'"):
        report.why("net/layer1/act:7")


def test_why_tells_outputs_of_one_operation_apart():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [64, 8], "x")
        w = v1.get_variable("w", initializer=np.eye(8, dtype="f"))
        a, b = tf.split(tf.tanh(tf.matmul(x, w)), 2, 1, name="two")
        h = a * tf.sigmoid(b) + tf.exp(tf.concat([a, a], 1))[:, :4]
        for _ in range(4):
            h = tf.tanh(tf.matmul(h, w[:4, :4]))
        loss = tf.reduce_mean(h**2)
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
    report = tflms.rewrite(graph, SETTINGS, loss=loss, fetches=[train])
    swapped = {swap.value for swap in report.swaps}
    for name in ("two", "two:1"):
        answer = report.why(name)
        assert ("is swapped" in answer) == (name in swapped), answer


def test_unknown_operations_are_named():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [4, 8], "x")
        w = v1.get_variable("w", initializer=np.eye(8, dtype="f"))
        h = x
        for _ in range(4):
            h = tf.tanh(tf.matmul(h, w))
        h = tf.quantization.fake_quant_with_min_max_vars_per_channel(h, [-1.0] * 8, [1.0] * 8)
        h = tf.tanh(tf.matmul(h, w))
        loss = tf.reduce_mean(h**2)
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
    report = tflms.rewrite(graph, SETTINGS, loss=loss, fetches=[train])
    assert "FakeQuantWithMinMaxVarsPerChannel" in report.unknown_ops
    assert "left alone" in str(report)
    name = next(
        op.name for op in graph.get_operations() if op.type == "FakeQuantWithMinMaxVarsPerChannel"
    )
    assert "unknown" in report.why(name)


@pytest.mark.parametrize(
    ("ends", "named"),
    [
        (lambda both: both, "'both', 'Exp'"),
        (lambda both: tf.ensure_shape(both, [128, 64]), None),
        (
            lambda both: tf.cond(v1.placeholder(tf.bool, []), lambda: both, lambda: 2 * both),
            "'cond'",
        ),
    ],
)
def test_what_no_prediction_counts_is_named(ends, named):
    with tf.Graph().as_default() as graph:
        w = v1.get_variable("w", [64, 64])
        h = tf.tanh(v1.placeholder(tf.float32, [64, 64]) @ w)
        both = tf.concat([h, h], v1.placeholder_with_default(0, []), name="both")
        if named == "'cond'":
            both.set_shape([128, 64])
        loss = tf.reduce_sum(tf.exp(ends(both)))
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
    report = tflms.rewrite(graph, {"memory_limit": 1 << 30}, loss=loss, fetches=[loss, train])
    told = " ".join(report.notes[1:])
    assert named in told if named else "'both'" not in told
    assert all(len(line) <= 100 for line in str(report).splitlines())
