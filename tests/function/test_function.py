"""tflms.function: a drop-in for tf.function whose steps give the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tflms
from tests.function.steps import EVERYTHING, Net, batch, train


def plain_result(batches):
    net = Net()
    return train(tf.function(net.step), net, batches)


@pytest.mark.parametrize("strategy", ["chain_rule", "direct_order"])
def test_a_rewritten_step_gives_every_loss_and_weight_bit_by_bit(strategy):
    batches = [batch(seed=i) for i in range(4)]
    net = Net()
    step = tflms.function(net.step, {**EVERYTHING, "strategy": strategy})
    assert train(step, net, batches) == plain_result(batches)
    report = step.report()
    assert len(report.swaps) >= 3
    assert report.subject == "step"
    assert report.verify().ok
    assert str(report.survival.expected) in str(report)


def test_new_shapes_trace_and_rewrite_again_and_old_ones_do_not():
    batches = [batch(8), batch(4), batch(8), batch(4)]
    net = Net()
    step = tflms.function(net.step, EVERYTHING)
    assert train(step, net, batches) == plain_result(batches)
    assert step.experimental_get_tracing_count() == 2
    assert [report.changed for report in step.reports] == [True, True]


def test_an_unknown_batch_size_is_taken_from_the_call():
    net = Net()
    spec = tf.TensorSpec([None, 16], tf.float32)
    step = tflms.function(net.step, EVERYTHING, input_signature=[spec])
    batches = [batch(8), batch(4)]
    assert train(step, net, batches) == plain_result(batches)
    assert step.experimental_get_tracing_count() == 1
    assert step.input_signature[0].shape.as_list() == [None, 16]
    assert max(swap.nbytes for swap in step.report().swaps) == 8 * 16 * 4
    assert any("batch of 8" in note for note in step.report().notes)


def test_the_config_knows_the_batch_size_better():
    net = Net()
    spec = tf.TensorSpec([None, 16], tf.float32)
    step = tflms.function(net.step, {**EVERYTHING, "batch_size": 100}, input_signature=[spec])
    step.get_concrete_function()
    assert max(swap.nbytes for swap in step.report().swaps) == 100 * 16 * 4


def test_a_concrete_function_is_rewritten_too_and_its_survival_is_seen_when_it_ran():
    net = Net()
    step = tflms.function(net.step, EVERYTHING)
    concrete = step.get_concrete_function(tf.TensorSpec([8, 16], tf.float32))
    report = step.report()
    assert set(report.inserted_names) <= {op.name for op in concrete.graph.get_operations()}
    with pytest.raises(tflms.TflmsError, match="has not been run yet"):
        report.verify()
    concrete(batch())
    assert report.verify().ok


def test_inserted_operations_stand_on_the_host_and_protected():
    net = Net()
    step = tflms.function(net.step, EVERYTHING)
    graph = step.get_concrete_function(tf.TensorSpec([8, 16], tf.float32)).graph
    for swap in step.report().swaps:
        for name in (swap.swap_out, *swap.swap_ins):
            op = graph.get_operation_by_name(name)
            assert "CPU:0" in op.device.upper()
            assert op.get_attr("_grappler_do_not_remove")


def test_methods_can_be_decorated_and_each_instance_has_its_own_traces():
    class Trainer:
        def __init__(self, seed):
            self.net = Net(seed=seed)

        @tflms.function(config=EVERYTHING)
        def step(self, x):
            return self.net.step(x)

    first, second = Trainer(0), Trainer(1)
    x = batch()
    assert float(first.step(x)) != float(second.step(x))
    assert first.step is first.step
    assert first.step.report().changed and second.step.report().changed
    plain = Net(seed=0)
    plain_step = tf.function(plain.step)
    assert np.asarray(plain_step(x)) != 0
    assert first.net.weights[0].numpy().tobytes() == plain.weights[0].numpy().tobytes()


def test_variables_made_at_the_first_call_work():
    made = {}

    def step(x):
        if not made:
            made["w"] = tf.Variable(tf.ones([16, 16]) * 0.1)
            made["v"] = tf.Variable(tf.ones([16, 16]) * 0.2)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(tf.matmul(tf.tanh(tf.matmul(x, made["w"])), made["v"])))
        for variable, gradient in zip(
            made.values(), tape.gradient(loss, list(made.values())), strict=True
        ):
            variable.assign_sub(0.1 * gradient)
        return loss

    rewritten = tflms.function(step, EVERYTHING)
    losses = [float(rewritten(batch())) for _ in range(3)]
    made.clear()
    plain = tf.function(step)
    assert losses == [float(plain(batch())) for _ in range(3)]
    assert rewritten.report().changed
    assert rewritten.report().verify().ok
    assert len(rewritten.reports) == 1  # of the two traces, the one that runs


def test_xla_is_refused_with_what_to_pass():
    with pytest.raises(tflms.ConfigError, match="jit_compile=False"):
        tflms.function(Net().step, {}, jit_compile=True)


def test_wrong_configs_are_refused_before_anything_is_traced():
    with pytest.raises(tflms.ConfigError, match="n_tensors"):
        tflms.function(Net().step, {"n_tensor": 3})
    with pytest.raises(tflms.ConfigError), tflms.enabled({"device": "/gpu:99x"}):
        pass


def test_an_error_in_the_rewrite_reaches_the_caller_and_the_next_trace_is_clean():
    net = Net()
    x = batch()
    plain = tf.function(net.step)
    with pytest.raises(tflms.ConfigError, match="no operation lies in the scope"):
        tflms.function(net.step, {**EVERYTHING, "incl_scopes": ["nowhere"]})(x)
    graph = plain.get_concrete_function(x).graph
    assert not any("tflms" in op.name for op in graph.get_operations())


def test_a_step_that_runs_eagerly_says_so(caplog):
    net = Net()
    step = tflms.function(net.step, EVERYTHING)
    tf.config.run_functions_eagerly(True)
    try:
        step(batch())
    finally:
        tf.config.run_functions_eagerly(False)
    assert "runs eagerly" in caplog.text
    assert not step.reports


def test_a_rewritten_function_is_not_exported_but_the_plain_one_is(tmp_path):
    net = Net()
    module = tf.Module()
    module.weights = net.weights
    step = tflms.function(net.step, EVERYTHING)
    x = batch()
    step(x)
    concrete = step.get_concrete_function(x)
    with pytest.raises(Exception, match="rewritten by tflms"):
        tf.saved_model.save(module, str(tmp_path / "rewritten"), signatures={"step": concrete})
    clean = tf.function(step.python_function).get_concrete_function(x)
    tf.saved_model.save(module, str(tmp_path / "plain"), signatures={"step": clean})
    loaded = tf.saved_model.load(str(tmp_path / "plain"))
    text = str(loaded.signatures["step"].graph.as_graph_def())
    assert "tflms" not in text
    checkpoint = tf.train.Checkpoint(module=module)
    before = net.weights[0].numpy()
    path = checkpoint.save(str(tmp_path / "checkpoint"))
    step(x)
    checkpoint.restore(path)
    np.testing.assert_array_equal(net.weights[0].numpy(), before)
