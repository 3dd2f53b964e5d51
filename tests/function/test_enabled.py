"""tflms.enabled: what is traced inside is rewritten, and nothing else."""

from __future__ import annotations

import threading

import pytest
import tensorflow as tf
from tensorflow.python.eager import imperative_grad
from tensorflow.python.eager.polymorphic_function import tracing_compilation, transform
from tensorflow.python.ops import gradients_util

import tflms
from tests.function.steps import EVERYTHING, Net, batch, train
from tflms.runtime import hook


def inserted(function, *specs):
    graph = function.get_concrete_function(*specs).graph
    return sum("swap" in op.name for op in graph.get_operations())


SPEC = tf.TensorSpec([8, 16], tf.float32)


def test_functions_traced_inside_are_rewritten_and_outside_they_are_not():
    net = Net()
    inside, outside = tf.function(net.step), tf.function(net.step)
    with tflms.enabled(EVERYTHING) as traced:
        assert inserted(inside, SPEC)
    assert not inserted(outside, SPEC)
    assert inserted(inside, SPEC) == 2 * len(traced.report.swaps)
    assert tflms.last_reports()[0] is traced.report


def test_blocks_nest_and_the_innermost_counts():
    net = Net()
    first, none, second = (tf.function(net.step) for _ in range(3))
    with tflms.enabled({**EVERYTHING, "n_tensors": 1}) as outer:
        assert inserted(first, SPEC) == 2
        with tflms.enabled({"strategy": "none"}) as inner:
            assert inserted(none, SPEC) == 0
        assert inserted(second, SPEC) == 2
    assert [report.changed for report in outer.reports] == [True, True]
    assert [report.changed for report in inner.reports] == [False]


def test_an_exception_leaves_nothing_behind():
    places = (
        tracing_compilation._maybe_define_function,
        imperative_grad.imperative_grad,
        gradients_util._GradientsHelper,
    )
    with pytest.raises(RuntimeError, match="on purpose"), tflms.enabled(EVERYTHING):
        tf.function(Net().step).get_concrete_function(SPEC)
        assert transform.FUNC_GRAPH_TRANSFORMS
        raise RuntimeError("on purpose")
    assert not transform.FUNC_GRAPH_TRANSFORMS
    assert places == (
        tracing_compilation._maybe_define_function,
        imperative_grad.imperative_grad,
        gradients_util._GradientsHelper,
    )
    assert hook.current() is None
    assert not inserted(tf.function(Net().step), SPEC)


def test_a_step_that_was_traced_before_is_told(caplog):
    step = tf.function(Net().step)
    step(batch())
    with tflms.enabled(EVERYTHING) as traced:
        step(batch())
        step(batch())
    assert caplog.text.count("was traced before") == 1
    assert "make the tf.function anew" in caplog.text
    assert not traced.report.changed
    assert any("'step' was traced before" in note for note in traced.report.notes)


def test_forward_functions_are_left_alone_without_a_warning(caplog):
    net = Net()
    forward = tf.function(net.forward)
    with tflms.enabled(EVERYTHING) as traced:
        forward(batch())
        for _ in tf.data.Dataset.range(3).map(lambda i: i * 2):
            pass
    assert not caplog.text
    assert not traced.reports
    assert any("'forward' was left alone: no gradients" in note for note in traced.report.notes)


def test_a_function_for_xla_is_left_alone_and_told(caplog):
    with tflms.enabled(EVERYTHING) as traced:
        compiled = tf.function(Net().step, jit_compile=True)
        assert not inserted(compiled, SPEC)
    assert "jit_compile=False" in caplog.text
    assert not traced.reports


def test_two_threads_under_two_configs_do_not_mix():
    ready = threading.Barrier(2)
    found = {}

    def work(name, config):
        net = Net()
        with tflms.enabled({**EVERYTHING, **config}) as traced:
            for _ in range(3):
                ready.wait()
                tf.function(net.step).get_concrete_function(SPEC)
        found[name] = [len(report.swaps) for report in traced.reports]
        found[name + " last"] = tflms.last_reports()[0] is traced.report

    configs = {"one": {"n_tensors": 1}, "three": {"n_tensors": 3}}
    threads = [threading.Thread(target=work, args=item) for item in configs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {
        "one": [1, 1, 1], "three": [3, 3, 3], "one last": True, "three last": True,
    }  # fmt: skip


def test_a_thread_outside_of_the_block_is_not_rewritten():
    found = []
    with tflms.enabled(EVERYTHING):
        thread = threading.Thread(
            target=lambda: found.append(inserted(tf.function(Net().step), SPEC))
        )
        thread.start()
        thread.join()
    assert found == [0]


def test_an_adapter_for_another_tensorflow_names_its_version(monkeypatch):
    monkeypatch.delattr(transform, "FUNC_GRAPH_TRANSFORMS")
    with pytest.raises(tflms.HandBackError, match=f"TensorFlow {tf.__version__} traces functions"):
        hook._Places()


def test_a_tensorflow_that_does_not_call_transforms_is_found_out(monkeypatch):
    monkeypatch.setattr(tracing_compilation, "_create_concrete_function", lambda *args: None)
    with pytest.raises(tflms.HandBackError, match="does not call the function-graph transforms"):
        hook._Places()


def test_the_same_numbers_come_out_of_a_block():
    batches = [batch(seed=i) for i in range(3)]
    plain, net = Net(), Net()
    expected = train(tf.function(plain.step), plain, batches)
    with tflms.enabled(EVERYTHING):
        assert train(tf.function(net.step), net, batches) == expected
