"""The survival check on a graph that comes from a GraphDef and so has no collections."""

import tensorflow as tf

import tflms

v1 = tf.compat.v1


def test_an_imported_graph_def_can_be_verified_and_an_undefended_rewrite_is_caught():
    built = tf.Graph()
    with built.as_default():
        h = v1.placeholder(tf.float32, [64, 64], "x")
        for i in range(5):
            h = tf.tanh(h @ v1.get_variable(f"w{i}", [64, 64], use_resource=True))
        loss = tf.reduce_mean(h, name="loss")
        v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
    for keep in (True, False):
        graph = tf.Graph()
        with graph.as_default():
            tf.import_graph_def(built.as_graph_def(), name="")
        report = tflms.rewrite(
            graph, {"min_swap_bytes": 0}, loss="loss:0", fetches=["train"], keep=keep
        )
        assert report.swaps
        assert report.verify().ok is keep
