"""Gradients of biases that oneDNN makes together with those of weights: no cycle comes of it."""

import numpy as np
import pytest
import tensorflow as tf

import tflms
from tests.strategies.step import chain
from tflms.errors import GraphError
from tflms.graph import text
from tflms.strategies import biases

v1 = tf.compat.v1
BLOCKS, BATCH, SIZE, CHANNELS = 3, 8, 12, 8


def convolved(random, x):
    """A convolution with a bias."""
    kernel = random.standard_normal((3, 3, x.shape[-1], CHANNELS)).astype("f") / 8
    bias = random.standard_normal(CHANNELS).astype("f") / 8
    return tf.nn.bias_add(tf.nn.conv2d(x, tf.Variable(kernel), 1, "SAME"), tf.Variable(bias))


def normalized(x):
    """A batch normalization."""
    one, zero = tf.Variable(np.ones(CHANNELS, "f")), tf.Variable(np.zeros(CHANNELS, "f"))
    return v1.nn.fused_batch_norm(x, one, zero)[0]


def rewritten(limit):
    """The graph of a residual network on the CPU that keeps a limit."""
    graph = tf.Graph()
    with graph.as_default(), tf.device("/cpu:0"):
        random = np.random.default_rng(0)
        x = v1.placeholder(tf.float32, (BATCH, SIZE, SIZE, 3))
        h = tf.nn.relu(convolved(random, x))
        for _ in range(BLOCKS):
            inner = tf.nn.relu(normalized(convolved(random, h)))
            h = tf.nn.relu(h + normalized(convolved(random, inner)))
        loss = tf.reduce_mean(tf.reduce_mean(h, [1, 2]) ** 2)
        variables = v1.trainable_variables()
        pairs = list(zip(tf.gradients(loss, variables), variables, strict=True))
        train = v1.train.MomentumOptimizer(0.1, 0.9).apply_gradients(pairs)
    config = {"memory_limit": limit, "min_swap_bytes": 1024}
    report = tflms.rewrite(graph, config, loss=loss, fetches=[loss, train])
    assert report.orders
    return graph


def needs(op, other):
    """Whether an operation runs after another one in any case."""
    stack, seen = [op], set()
    while stack:
        here = stack.pop()
        if here is other:
            return True
        if here not in seen:
            seen.add(here)
            stack += [*(x.op for x in here.inputs), *here.control_inputs]
    return False


@pytest.mark.parametrize("limit", [0.9, 0.8, 0.6])
def test_what_may_be_merged_waits_for_nothing_that_waits_for_its_other_half(limit):
    # TensorFlow would merge the two all the same, and end the step before the cycle, silently.
    graph = rewritten(limit)
    pairs = 0
    for weight in graph.get_operations():
        if weight.type != "Conv2DBackpropFilter":
            continue
        for bias in weight.inputs[2].consumers():
            if bias.type == "BiasAddGrad":
                pairs += 1
                assert not needs(weight, bias)
                assert not needs(bias, weight)
    assert pairs == 1 + 2 * BLOCKS


@pytest.mark.parametrize(("device", "merged"), [("", True), ("/cpu:0", True), ("/emu:0", False)])
def test_the_two_that_read_one_gradient_are_a_pair_on_the_cpu(device, merged):
    where = f" @{device}" if device else ""
    source = chain(3).replace(
        "u2 =",
        f"k = Conv2DBackpropFilter(h1, w2, da2) : f32[3,3,8,8]{where}\n"
        f"b = BiasAddGrad(da2) : f32[8]\nc = BiasAddGrad(da3) : f32[8]\nu2 =",
    )
    graph = text.parse(source)
    found = biases.merged(graph, [op.id for op in graph.ops()], "CPU")
    names = [tuple(graph.op(op).name for op in pair[:2]) for pair in found]
    assert names == ([("k", "b")] if merged else [])


def test_where_the_program_has_one_wait_for_the_other_nothing_else_comes_between():
    source = chain(3).replace(
        "u2 =",
        "b = BiasAddGrad(da2) : f32[8]\nt = NoOp() after b\ng = Identity(da2) : f32[64,8] after t\n"
        "k = Conv2DBackpropFilter(h1, w2, g) : f32[3,3,8,8]\ni = Exp(g) : f32[64,8]\nu2 =",
    )
    graph = text.parse(source)
    ((kernel, bias, behind),) = biases.merged(graph, [op.id for op in graph.ops()], "CPU")
    assert [graph.op(op).name for op in (kernel, bias, *behind)] == ["k", "b", "i"]


PAIR = """
x = Placeholder() : f32[8]
d = Exp(x) : f32[8]
k = Conv2DBackpropFilter(x, x, d) : f32[8]
u = Neg(k) : f32[8]
b = BiasAddGrad(d) : f32[8]
"""


def test_a_way_from_one_half_to_the_other_is_refused():
    graph = text.parse(PAIR)
    biases.check(graph, "CPU")
    graph.seal()
    graph.add_control(text.op_named(graph, "b"), text.op_named(graph, "u"))
    with pytest.raises(GraphError, match=r"'k' and 'b' may become one kernel"):
        biases.check(graph, "CPU")
    biases.check(graph, "EMU")


def test_what_the_program_waits_for_itself_is_no_new_way():
    graph = text.parse(PAIR.replace("BiasAddGrad(d) : f32[8]", "BiasAddGrad(d) : f32[8] after u"))
    graph.seal()
    biases.check(graph, "CPU")
