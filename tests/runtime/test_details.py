"""What the IR is told of function arguments, transpositions and equal constants."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tflms.graph.ir import Graph
from tflms.planning.buffers import Buffers
from tflms.planning.cost import sizes
from tflms.runtime import details
from tflms.runtime.read import read

_KIB = 1024


def _noted(function: object, *specs: tf.TensorSpec) -> tuple[Graph, tuple[int, ...]]:
    concrete = tf.function(function).get_concrete_function(*specs)
    found = read(concrete.graph)
    details.note(found)
    graph = found.graph
    within = {op.id for op in graph.ops()}
    return graph, Buffers.of(graph, sizes(graph), within).persistent


def test_an_argument_of_a_function_is_held_all_step_long():
    _, persistent = _noted(lambda x: tf.reduce_sum(x * 2.0), tf.TensorSpec([64, 64]))
    assert 16 * _KIB in persistent


def test_a_placeholder_of_a_session_is_let_go_of():
    graph = tf.Graph()
    with graph.as_default():
        tf.reduce_sum(tf.compat.v1.placeholder(tf.float32, [64, 64]) * 2.0)
    found = read(graph)
    details.note(found)
    within = {op.id for op in found.graph.ops()}
    assert 16 * _KIB not in Buffers.of(found.graph, sizes(found.graph), within).persistent


def test_a_transposition_that_only_moves_dimensions_of_one_is_a_view():
    def step(x: tf.Tensor) -> tf.Tensor:
        kept = tf.transpose(tf.exp(x), [1, 0, 2])
        return tf.reduce_sum(tf.transpose(kept, [2, 1, 0]))

    graph, _ = _noted(step, tf.TensorSpec([1, 32, 16]))
    first, second = (op for op in graph.ops() if op.type == "Transpose")
    assert "moves_nothing" in first.attrs
    assert "moves_nothing" not in second.attrs


def test_constants_that_are_computed_alike_count_once_and_others_each():
    def step(x: tf.Tensor) -> tf.Tensor:
        for scale in (2.0, 2.0, 3.0):
            x = x * (tf.constant(np.ones([64, 64], np.float32)) * scale)
        return tf.reduce_sum(x)

    _, persistent = _noted(step, tf.TensorSpec([64, 64]))
    assert persistent.count(16 * _KIB) == 3  # the argument, and two constants of four


def test_constants_that_are_colocated_with_others_count_each():
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [64, 64])
        y = tf.exp(x)
        for place in (x, y, y):
            with tf.compat.v1.colocate_with(place):
                y = y + tf.fill([64, 64], 2.0)
        tf.reduce_sum(y)
    found = read(graph)
    details.note(found)
    within = {op.id for op in found.graph.ops()}
    persistent = Buffers.of(found.graph, sizes(found.graph), within).persistent
    assert persistent.count(16 * _KIB) == 2  # of three, two stand at one place
