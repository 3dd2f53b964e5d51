"""Real-world training graphs that a rewrite must leave intact.

Each entry of CASES builds, in code of our own, one training graph of the kind that a public report
is about: the comment above it gives the link, what went wrong there, and what must hold here after
a rewrite. No code and no wording comes from the reports.

What must hold after every rewrite (said once, not repeated at each case):
  G1  every fetch and every variable has the same value after every run as without the rewrite, bit
      for bit (unless exact=False: then `check` decides alone);
  G2  every fetch, feed, init op and train op is found under its old name, with its old dtype and
      static shape;
  G3  anything stateful (random op, assign, iterator, print, py function, queue, in-place op) runs
      as often as before: it is not duplicated;
  G4  device, colocation group, user attributes and control inputs of the old operations stay; new
      operations have a device of their own;
  G5  collections are still there (collections_of);
  G6  a run that does not ask for the train op runs nothing that was added for the backward phase;
  G7  no cycle and no deadlock, with every subset of the fetches;
  G8  what is named in `untouchable` is not parked; the tensors in `interesting` are those that a
      useful plan would move.
"""

import collections
import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1

# One session.run of a user's loop: `op` (None: only fetch), `keys` of the
# case's fetches to ask for (None: all), `feed` (dict, or callable
# (session, graph) -> dict; keys are tensors or tensor names).
Run = collections.namedtuple("Run", "op keys feed")


@dataclasses.dataclass
class GraphCase:
    """A finished training graph and the session loop its owner runs."""

    graph: Any
    fetches: dict  # key -> tensor; "loss" is always there
    train_op: Any  # operation or tensor, None if `plan` has it
    feed_dict: Any = None  # the feed of every step
    steps: int = 3
    plan: list | None = None  # list of Run, in place of steps*train_op
    init: Any = None  # run first, in order
    config: Any = None  # ConfigProto
    check: Callable | None = None  # (list of results) -> raises if wrong
    after: Callable | None = None  # (session, graph, case) at the end
    exact: bool = True  # results must equal the un-rewritten ones
    interesting: tuple = ()  # names of tensors worth parking
    untouchable: tuple = ()  # names never to park nor to recompute
    extra: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        g = self.graph
        with g.as_default():
            if self.init is None:
                self.init = [
                    v1.global_variables_initializer(),
                    v1.local_variables_initializer(),
                    v1.tables_initializer(),
                ]
            self.reads = {v.name: g.as_graph_element(v).name for v in v1.global_variables()}
        self.collections = collections_of(g)
        for name in tuple(self.interesting) + tuple(self.untouchable):
            g.as_graph_element(name)  # a typo in a case shows here


def collections_of(graph):
    """Collection key -> sorted names of what it holds."""
    out = {}
    for key in graph.get_all_collection_keys():
        names = sorted(getattr(x, "name", str(x)) or "?" for x in graph.get_collection(key))
        out[str(key)] = names
    return out


def devices_of(graph):
    """Operation name -> requested device."""
    return {op.name: op.device for op in graph.get_operations()}


def run_graph(case, graph=None, steps=None):
    """Run the owner's loop on `graph` (default: the case's own; pass the
    rewritten graph to test a rewriter). Everything is found by name.
    -> a list with one dict of fetched values and variables for each run."""
    g = case.graph if graph is None else graph

    def here(x):
        return g.as_graph_element(x if isinstance(x, str) else x.name)

    plan = case.plan or [Run(case.train_op, None, case.feed_dict)] * (steps or case.steps)
    out = []
    with v1.Session(graph=g, config=case.config) as sess:
        for op in case.init:
            sess.run(here(op))
        for r in plan:
            feed = r.feed(sess, g) if callable(r.feed) else (r.feed or {})
            feed = {here(k): v for k, v in feed.items()}
            keys = case.fetches if r.keys is None else r.keys
            fetch = {k: here(case.fetches[k]) for k in keys}
            ops = [] if r.op is None else [here(r.op)]
            values, _ = sess.run([fetch, ops], feed)
            values.update(
                {
                    "var:" + k: v
                    for k, v in sess.run({k: here(n) for k, n in case.reads.items()}).items()
                }
            )
            out.append(values)
        if case.check:
            case.check(out)
        if case.after:
            case.after(sess, g, case)
    return out


def assert_same(a, b, rtol=0.0, atol=0.0):
    """Two results of a run_* function hold the same numbers."""
    assert len(a) == len(b), (len(a), len(b))
    for i, (p, q) in enumerate(zip(a, b, strict=False)):
        assert set(p) == set(q), set(p) ^ set(q)
        for k in p:
            x, y = np.asarray(p[k]), np.asarray(q[k])
            assert x.dtype == y.dtype and x.shape == y.shape, (i, k)
            if x.dtype.kind in "fc":
                np.testing.assert_allclose(x, y, rtol, atol, err_msg=f"run {i}, {k}")
            else:
                np.testing.assert_array_equal(x, y, f"run {i}, {k}")


# --------------------------------------------------------------------------
# Small building blocks
# --------------------------------------------------------------------------


def rand(seed, *shape, scale=1.0, dtype=np.float32):
    return (np.random.RandomState(seed).standard_normal(shape) * scale).astype(dtype)


def var(name, value, **kw):
    """A v1 variable with a fixed start value."""
    value = np.asarray(value)
    return v1.get_variable(
        name,
        shape=value.shape,
        dtype=tf.as_dtype(value.dtype),
        initializer=v1.constant_initializer(value),
        **kw,
    )


def dense(x, units, name, seed, act=tf.tanh, trainable=True):
    with v1.variable_scope(name):
        n = int(x.shape[-1])
        w = var("w", rand(seed, n, units, scale=n**-0.5), trainable=trainable)
        b = var("b", rand(seed + 1, units, scale=0.1), trainable=trainable)
        y = tf.nn.bias_add(tf.matmul(x, w), b)
        return act(y, name="act") if act else tf.identity(y, name="out")


def conv(x, filters, name, seed, size=3, stride=1, act=tf.nn.relu):
    with v1.variable_scope(name):
        n = int(x.shape[-1])
        k = var("k", rand(seed, size, size, n, filters, scale=(size * size * n) ** -0.5))
        b = var("b", rand(seed + 1, filters, scale=0.1))
        y = tf.nn.bias_add(tf.nn.conv2d(x, k, stride, "SAME"), b)
        return act(y, name="act") if act else y


def sgd(loss, lr=0.1, **kw):
    return v1.train.GradientDescentOptimizer(lr).minimize(loss, **kw)


@contextlib.contextmanager
def control_flow_v1():
    """Build Switch/Merge/Enter/Exit in place of If/While."""
    was = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    try:
        yield
    finally:
        if was:
            v1.enable_control_flow_v2()


CASES = collections.OrderedDict()


def case(fn):
    CASES[fn.__name__] = fn
    return fn


# --------------------------------------------------------------------------
# Cases
# --------------------------------------------------------------------------


# https://github.com/cybertronai/gradient-checkpointing/issues/7
# A network with an RNN loop could not be rewritten at all: nodes that live in
# a loop were picked as checkpoints, and the gradient code then met a loop
# context that it did not know.
# Must hold: the While op, its bodies and the tensor lists (variant dtype)
# that carry the activations of the loop are left alone; the dense layers
# before and after the loop may be parked or recomputed.
@case
def rnn_while_v2_tensorarray():
    g = tf.Graph()
    with g.as_default():
        x = v1.placeholder(tf.float32, [4, 9, 6], "x")
        y = v1.placeholder(tf.float32, [4, 3], "y")
        inp = dense(tf.reshape(x, [36, 6]), 8, "before", 1)
        inp = tf.transpose(tf.reshape(inp, [4, 9, 8]), [1, 0, 2])
        wx = var("wx", rand(3, 8, 8, scale=0.3))
        wh = var("wh", rand(4, 8, 8, scale=0.3))
        ta = tf.TensorArray(tf.float32, 9, element_shape=[4, 8])

        def step(t, h, out):
            h = tf.tanh(inp[t] @ wx + h @ wh)
            return t + 1, h, out.write(t, h)

        _, h, ta = tf.while_loop(lambda t, h, out: t < 9, step, [0, tf.zeros([4, 8]), ta])
        both = tf.concat([h, tf.reduce_mean(ta.stack(), 0)], 1, name="both")
        top = dense(both, 16, "after", 5)
        loss = tf.reduce_mean((dense(top, 3, "head", 7, None) - y) ** 2)
        train = v1.train.AdamOptimizer(0.01).minimize(loss)
        lists = [t.name for op in g.get_operations() for t in op.outputs if t.dtype == tf.variant]
    return GraphCase(
        g,
        {"loss": loss, "h": h},
        train,
        {x: rand(11, 4, 9, 6), y: rand(12, 4, 3)},
        interesting=("before/act:0", "after/act:0"),
        untouchable=tuple(lists[:4]),
    )


# https://github.com/cybertronai/gradient-checkpointing/issues/47
# Batch norm whose train/predict choice is a tf.cond on a fed flag, with
# resource variables: copying the ops of the branch broke the rewrite.
# Must hold: both values of the flag work on the same rewritten graph; in a
# run with the flag off the moving averages keep their values.
@case
def cond_train_flag_batchnorm():
    g = tf.Graph()
    with g.as_default():
        x = v1.placeholder(tf.float32, [None, 10], "x")
        y = v1.placeholder(tf.float32, [None, 1], "y")
        flag = v1.placeholder_with_default(True, [], "is_training")
        h = dense(x, 12, "d1", 1)
        mean = var("mean", np.zeros(12, np.float32), trainable=False)
        vari = var("vari", np.ones(12, np.float32), trainable=False)
        gamma = var("gamma", np.ones(12, np.float32))

        def batch():
            m, v = tf.nn.moments(h, [0])
            with tf.control_dependencies(
                [mean.assign_sub(0.1 * (mean - m)), vari.assign_sub(0.1 * (vari - v))]
            ):
                return tf.identity(m), tf.identity(v)

        m, v = tf.cond(flag, batch, lambda: (mean.read_value(), vari.read_value()))
        z = tf.nn.relu(gamma * (h - m) * tf.math.rsqrt(v + 1e-3), "bn_relu")
        loss = tf.reduce_mean((dense(z, 1, "d2", 4, None) - y) ** 2)
        train = sgd(loss, 0.05)
    feeds = [
        {x: rand(21 + i, 6, 10), y: rand(31 + i, 6, 1), flag: f}
        for i, f in enumerate([True, False, True, False])
    ]
    plan = [Run(train if f[flag] else None, None, f) for f in feeds]

    def check(res):
        assert np.array_equal(res[0]["var:mean:0"], res[1]["var:mean:0"])
        assert not np.array_equal(res[1]["var:mean:0"], res[2]["var:mean:0"])

    return GraphCase(
        g, {"loss": loss}, train, plan=plan, check=check, interesting=("d1/act:0", "bn_relu:0")
    )


# https://github.com/pytorch/pytorch/issues/96136
# A recomputed block holds a batch norm, so its running statistics moved
# twice in each step; loss and gradients look right, evaluation does not.
# Must hold: each moving statistic moves once a step (check recalculates it
# from the fetched batch means); two layers leave their updates to the train
# op (UPDATE_OPS), the one between updates in place, inside the forward pass.
@case
def bn_update_ops_once():
    g = tf.Graph()
    with g.as_default():
        x = v1.placeholder(tf.float32, [4, 8, 8, 3], "x")
        h, means = x, {}
        for i in range(3):
            h = conv(h, 6, f"c{i}", 10 * i, act=None)
            with v1.variable_scope(f"bn{i}"):
                gamma = var("gamma", np.ones(6, np.float32))
                beta = var("beta", np.zeros(6, np.float32))
                mm = var("mm", np.zeros(6, np.float32), trainable=False)
                mv = var("mv", np.ones(6, np.float32), trainable=False)
                h, m, v = v1.nn.fused_batch_norm(h, gamma, beta)
                ups = [
                    ref.assign_sub(0.1 * (ref - new), read_value=False)
                    for ref, new in ((mm, m), (mv, v))
                ]
                if i == 1:  # in place: the layer waits for them
                    with tf.control_dependencies(ups):
                        h = tf.identity(h)
                else:
                    for u in ups:
                        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, u)
                h = tf.nn.relu(h, "act")
                means[f"m{i}"] = tf.identity(m, "batch_mean")
        loss = tf.reduce_mean(h**2)
        with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
            train = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)

    def check(res):
        for i in range(3):
            want = np.zeros(6)
            for r in res:
                want = want - 0.1 * (want - r[f"m{i}"])
                np.testing.assert_allclose(r[f"var:bn{i}/mm:0"], want, 1e-4, 1e-5)

    return GraphCase(
        g,
        dict(means, loss=loss),
        train,
        {x: rand(5, 4, 8, 8, 3)},
        check=check,
        interesting=("bn0/act:0", "bn1/act:0"),
    )


# https://github.com/openai/guided-diffusion/issues/167
# (asked of the TF1 library, too: cybertronai/gradient-checkpointing#35)
# Blocks with dropout were run again in the backward pass with a fresh random
# mask: the gradient belonged to another sample than the loss, and training
# drifted off.
# Must hold: no seed is set anywhere, so runs differ; but in each run the
# gradient is zero exactly where the forward mask dropped a unit.
@case
def dropout_unseeded_mask():
    g = tf.Graph()
    with g.as_default():
        x = v1.placeholder(tf.float32, [16, 10], "x")
        h = dense(x, 40, "d1", 1)
        drop = tf.nn.dropout(h, rate=0.5)
        h2 = dense(drop, 40, "d2", 3)
        drop2 = tf.nn.dropout(h2, rate=0.3)
        loss = tf.reduce_mean(dense(drop2, 1, "d3", 5, None) ** 2)
        tv = v1.trainable_variables()
        *gs, dh, dh2 = tf.gradients(loss, [*tv, h, h2])
        train = v1.train.GradientDescentOptimizer(0.05).apply_gradients(zip(gs, tv, strict=False))
        randoms = tuple(
            op.outputs[0].name for op in g.get_operations() if op.type == "RandomUniform"
        )

    def check(res):
        for r in res:
            for d, gr in (("drop", "dh"), ("drop2", "dh2")):
                np.testing.assert_array_equal(r[d] == 0, r[gr] == 0, d)
        assert not np.array_equal(res[0]["drop"] == 0, res[1]["drop"] == 0)

    return GraphCase(
        g,
        {"loss": loss, "drop": drop, "drop2": drop2, "dh": dh, "dh2": dh2},
        train,
        {x: rand(7, 16, 10)},
        check=check,
        exact=False,
        interesting=("d1/act:0", "d2/act:0"),
        untouchable=randoms,
    )


# https://github.com/tensorflow/tensorflow/pull/109358
# Grappler's recomputation, widened from a fixed list of ops to "all that is
# cheap", also duplicated reads of variables; copies ran at a moment when the
# variable held another value, or none yet.
# Must hold: what a recomputed op reads from a variable is what the forward
# pass read: here `gain` is raised in the same step, right after its use.
@case
def weights_reread_after_assign():
    g = tf.Graph()
    with g.as_default():
        x = v1.placeholder(tf.float32, [5, 8], "x")
        gain = var("gain", np.float32(1.0), trainable=False)
        w = var("w", rand(1, 8, 8, scale=0.3))
        h = tf.tanh(tf.matmul(x, w.read_value()), "h")
        used = tf.multiply(h, tf.exp(gain.read_value()), "used")
        with tf.control_dependencies([used]):
            bump = gain.assign_add(0.5, read_value=False)
        h2 = tf.tanh(tf.matmul(used, w.read_value()), "h2")  # w once more
        h3 = tf.tanh(tf.matmul(h2, w.read_value()), "h3")
        loss = tf.reduce_mean(h3**2)
        with tf.control_dependencies([bump]):
            train = sgd(loss, 0.5)
    return GraphCase(
        g,
        {"loss": loss, "used": used},
        train,
        {x: rand(2, 5, 8)},
        steps=4,
        interesting=("h:0", "used:0", "h2:0"),
    )


# https://github.com/cybertronai/gradient-checkpointing/issues/29
# Among others: someone trains a CycleGAN, and the automatic choice of
# checkpoints finds no bottleneck or fails; one graph has several losses.
# Must hold: the two train ops can be run one after the other or each alone;
# a discriminator step never changes the generator (its backward phase must
# not be dragged in by a control edge), and the other way round.
@case
def gan_two_optimizers():
    g = tf.Graph()
    with g.as_default():
        z = v1.placeholder(tf.float32, [6, 4], "z")
        real = v1.placeholder(tf.float32, [6, 10], "real")
        with v1.variable_scope("gen"):
            fake = dense(dense(z, 16, "g1", 1), 10, "g2", 3)

        def disc(t):
            with v1.variable_scope("disc", reuse=v1.AUTO_REUSE):
                return dense(dense(t, 16, "d1", 5), 1, "d2", 7, None)

        on_real, on_fake = disc(real), disc(fake)
        d_loss = tf.reduce_mean(tf.nn.softplus(-on_real) + tf.nn.softplus(on_fake))
        g_loss = tf.reduce_mean(tf.nn.softplus(-on_fake))
        tv = v1.trainable_variables
        d_train = v1.train.AdamOptimizer(1e-2, name="AdamD").minimize(d_loss, var_list=tv("disc"))
        g_train = v1.train.AdamOptimizer(1e-2, name="AdamG").minimize(g_loss, var_list=tv("gen"))
    feed = {z: rand(11, 6, 4), real: rand(12, 6, 10)}
    plan = [Run(op, None, feed) for op in (d_train, g_train, d_train, d_train, g_train)]

    def check(res):
        a = [r["var:gen/g1/w:0"] for r in res]
        assert not np.array_equal(a[0], a[1])
        assert np.array_equal(a[1], a[2]) and np.array_equal(a[2], a[3])
        b = [r["var:disc/d1/w:0"] for r in res]
        assert np.array_equal(b[0], b[1]) and not np.array_equal(b[1], b[2])

    return GraphCase(
        g,
        {"loss": d_loss, "g_loss": g_loss},
        None,
        plan=plan,
        check=check,
        interesting=("gen/g1/act:0", "gen/g2/act:0"),
    )


# https://github.com/IBM/tensorflow-large-model-support/issues/6
# The start of the backward phase was looked up by a name scope that the user
# had to give; with another optimizer or TF version no operation was found and
# the run stopped.
# Must hold: the backward phase is found though no scope is called
# "gradients", and though a forward layer is.
@case
def gradients_in_custom_scope():
    g = tf.Graph()
    with g.as_default():
        x = v1.placeholder(tf.float32, [4, 8], "x")
        with tf.name_scope("gradients"):  # a forward layer
            h = dense(x, 12, "enc", 1)
        h = dense(h, 12, "training_RMSprop", 3)
        loss = tf.reduce_mean(dense(h, 1, "out", 5, None) ** 2)
        with tf.name_scope("step/phase_two"):
            tvars = v1.trainable_variables()
            grads = tf.gradients(loss, tvars, name="bwd")
        opt = v1.train.RMSPropOptimizer(0.01, name="upd")
        train = opt.apply_gradients(zip(grads, tvars, strict=False), name="do_it")
    return GraphCase(
        g,
        {"loss": loss},
        train,
        {x: rand(7, 4, 8)},
        interesting=("gradients/enc/act:0", "training_RMSprop/act:0"),
    )


# https://github.com/tensorflow/tensorflow/issues/23566
# The gradient of an embedding comes as IndexedSlices; when it meets a gather
# or a dense gradient it is made dense, of a shape that is not known before.
# Must hold: the table is used for lookup and as output layer (sparse and
# dense gradient are added up), the position table by sparse updates only;
# ids (int64) and the slices' indices may not be changed.
@case
def tied_embedding_indexed_slices():
    g = tf.Graph()
    with g.as_default():
        ids = v1.placeholder(tf.int64, [3, 5], "ids")
        nxt = v1.placeholder(tf.int64, [3, 5], "next")
        table = var("table", rand(1, 20, 8))
        pos = var("pos", rand(2, 32, 8))
        e = tf.gather(table, ids)
        uniq, idx = tf.unique(tf.constant([0, 1, 2, 1, 0], tf.int64))
        e = e + tf.gather(tf.nn.embedding_lookup(pos, uniq), idx)
        h = dense(tf.reshape(e, [15, 8]), 8, "mix", 3)
        logits = tf.matmul(h, table, transpose_b=True)
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels=tf.reshape(nxt, [15]), logits=logits
            )
        )
        grads = tf.gradients(loss, [table, pos])
        train = v1.train.AdamOptimizer(0.05).minimize(loss)
        fetch = {
            "loss": loss,
            "g_table": tf.convert_to_tensor(grads[0]),
            "g_pos": tf.convert_to_tensor(grads[1]),
        }
    feed = {
        ids: [[1, 1, 2, 3, 1], [4, 5, 6, 4, 4], [0, 19, 0, 19, 7]],
        nxt: [[1, 2, 3, 1, 0], [5, 6, 4, 4, 4], [19, 0, 19, 7, 7]],
    }
    return GraphCase(g, fetch, train, feed, interesting=("mix/act:0",))


# https://github.com/keras-team/keras/issues/14829
# (and tensorflow/addons#2525, where the accumulated gradient got lost for
# want of control edges)
# Gradients are summed over four small batches and applied by a tf.cond.
# Must hold: accumulators, counter and weights move exactly as before; reads
# of the accumulators stay behind the writes.
@case
def grad_accumulation_cond_apply():
    g = tf.Graph()
    with g.as_default():
        x = v1.placeholder(tf.float32, [2, 8], "x")
        loss = tf.reduce_mean(dense(dense(x, 16, "d1", 1), 1, "d2", 3, None) ** 2)
        tvars = v1.trainable_variables()
        grads = tf.gradients(loss, tvars)
        opt = v1.train.AdamOptimizer(0.01)
        acc = [
            var(f"acc/{i}", np.zeros(v.shape, np.float32), trainable=False)
            for i, v in enumerate(tvars)
        ]
        count = var("count", np.int64(0), trainable=False)
        add = [a.assign_add(gr) for a, gr in zip(acc, grads, strict=False)]
        with tf.control_dependencies(add):
            now = count.assign_add(1)

        def apply():
            done = opt.apply_gradients(
                [(a.read_value() / 4.0, v) for a, v in zip(acc, tvars, strict=False)]
            )
            with tf.control_dependencies([done]):
                zero = [a.assign(tf.zeros_like(a)) for a in acc]
            with tf.control_dependencies(zero):
                return tf.constant(True)

        with tf.control_dependencies([now]):
            did = tf.cond(tf.equal(now % 4, 0), apply, lambda: tf.constant(False))
        train = tf.group(did, name="accumulate_or_apply")
    plan = [Run(train, None, {x: rand(40 + i, 2, 8)}) for i in range(6)]

    def check(res):
        w = [r["var:d1/w:0"] for r in res]
        assert np.array_equal(w[0], w[2]) and not np.array_equal(w[2], w[3])
        assert np.array_equal(w[3], w[5]) and res[-1]["var:count:0"] == 6

    return GraphCase(g, {"loss": loss}, train, plan=plan, check=check, interesting=("d1/act:0",))


# https://github.com/cybertronai/gradient-checkpointing/issues/42
# Users feed by generators and input pipelines instead of a placeholder and
# cannot tell whether the rewrite has any effect there.
# Must hold: the iterator moves on once a step (no second GetNext), strings
# and iterator resource are left alone, key and features stay together.
@case
def tfdata_iterator_string_keys():
    g = tf.Graph()
    with g.as_default():
        feats = rand(1, 12, 6) + np.arange(12, dtype=np.float32)[:, None] * 10
        ds = (
            tf.data.Dataset.from_tensor_slices(
                {"key": [f"row-{i:02d}" for i in range(12)], "x": feats, "y": rand(2, 12, 1)}
            )
            .batch(4)
            .repeat()
        )
        it = v1.data.make_initializable_iterator(ds)
        b = it.get_next()
        h = dense(b["x"] * 0.01, 16, "d1", 3)
        h = dense(h, 16, "d2", 5)
        loss = tf.reduce_mean((dense(h, 1, "d3", 7, None) - b["y"]) ** 2)
        train = sgd(loss)
        init = [v1.global_variables_initializer(), it.initializer]
        got = [t.name for t in b["x"].op.outputs]
        res_name = it._iterator_resource.name

    def check(res):
        for i, r in enumerate(res):
            rows = [int(k.decode()[-2:]) for k in r["key"]]
            assert rows == [(4 * i + j) % 12 for j in range(4)], rows
            np.testing.assert_allclose(r["x"], feats[rows])

    return GraphCase(
        g,
        {"loss": loss, "key": b["key"], "x": b["x"]},
        train,
        steps=4,
        init=init,
        check=check,
        interesting=("d1/act:0", "d2/act:0"),
        untouchable=(*tuple(got), res_name),
    )


# https://github.com/tensorflow/tensorflow/issues/11036
# Training on a sparse feed: the backward pass gathers one row for each
# non-zero element, more memory than the activations themselves.
# Must hold: the three tensors of the sparse feed (one of them int64 with an
# unknown number of rows) arrive unchanged; shapes that are not known before
# the run do not stop the rewrite.
@case
def sparse_placeholder_matmul():
    g = tf.Graph()
    with g.as_default():
        sp = v1.sparse_placeholder(tf.float32, [None, 30], "sp")
        y = v1.placeholder(tf.float32, [None, 2], "y")
        w = var("w", rand(1, 30, 16, scale=0.3))
        h = tf.tanh(tf.sparse.sparse_dense_matmul(sp, w), "h")
        h = dense(h, 12, "d2", 3)
        loss = tf.reduce_mean((dense(h, 2, "d3", 5, None) - y) ** 2)
        train = sgd(loss)
    plan = []
    for i, rows in enumerate([4, 7, 2]):
        r = np.random.RandomState(i)
        m = r.rand(rows, 30) < 0.2
        m[0, 0] = True
        plan.append(
            Run(
                train,
                None,
                {
                    sp.indices: np.argwhere(m).astype(np.int64),
                    sp.values: r.standard_normal(m.sum()).astype(np.float32),
                    sp.dense_shape: np.array([rows, 30], np.int64),
                    y: rand(9 + i, rows, 2),
                },
            )
        )
    return GraphCase(g, {"loss": loss}, train, plan=plan, interesting=("h:0", "d2/act:0"))


# https://github.com/tensorflow/tensorflow/pull/39860
# int32 tensors live in host memory even beside GPU kernels; code that moves
# them like floats hands a kernel an address of the wrong side.
# Must hold: the small int32 and bool tensors of the shape arithmetic, which
# the backward phase uses too, are not parked; the masks have no effect on
# the numbers of what is.
@case
def int32_bool_masks():
    g = tf.Graph()
    with g.as_default():
        x = v1.placeholder(tf.float32, [None, None, 6], "x")
        length = v1.placeholder(tf.int32, [None], "length")
        n, t = tf.shape(x)[0], tf.shape(x)[1]
        mask = tf.sequence_mask(length, t, name="mask")
        h = dense(tf.reshape(x, [-1, 6]), 10, "d1", 1)
        h = tf.reshape(h, tf.stack([n, t, 10]))
        h = tf.where(mask[:, :, None], h, tf.fill(tf.shape(h), -1e9))
        best = tf.reduce_max(h, 1)
        idx = tf.math.argmax(h, 1, output_type=tf.int32)
        flat = tf.boolean_mask(h, mask)
        tot = tf.math.unsorted_segment_sum(flat, tf.repeat(tf.range(n), length), n)
        z = tf.tile(best + tot, [1, 2], name="z")
        loss = tf.reduce_mean(dense(z, 1, "d2", 4, None) ** 2)
        train = sgd(loss, 0.01)
        ints = tuple(
            tt.name
            for op in g.get_operations()
            for tt in op.outputs
            if tt.dtype in (tf.int32, tf.bool) and op.type in ("Shape", "Pack", "Range")
        )
    plan = [
        Run(train, None, {x: rand(20 + i, b, s, 6), length: ln})
        for i, (b, s, ln) in enumerate([(3, 5, [5, 1, 3]), (2, 7, [7, 2]), (4, 4, [4, 4, 1, 2])])
    ]
    return GraphCase(
        g,
        {"loss": loss, "idx": idx},
        train,
        plan=plan,
        interesting=("d1/act:0", "z:0"),
        untouchable=ints[:8],
    )


# https://github.com/tensorflow/tensorflow/issues/16669
# Grappler's memory optimizer complained about convolution gradients whose
# output shape it could not infer.
# Must hold: sizes are unknown (batch, height and width; one tensor has not
# even a rank) and change from step to step; the rewrite works without them.
@case
def unknown_shapes():
    g = tf.Graph()
    with g.as_default():
        raw = v1.placeholder(tf.float32, None, "raw")  # no rank at all
        x = tf.reshape(raw, tf.concat([tf.shape(raw)[:-1], [3]], 0))
        x = tf.ensure_shape(x, [None, None, None, 3])
        h = conv(x, 5, "c1", 1)
        h = conv(h, 5, "c2", 3, stride=2)
        up = tf.image.resize(h, tf.shape(x)[1:3], "nearest")
        both = tf.concat([x, up], 3)
        h = conv(both, 4, "c3", 5)
        loss = tf.reduce_mean(h**2)
        train = sgd(loss)
    plan = [
        Run(train, None, {raw: rand(i, *s)})
        for i, s in enumerate([(2, 8, 8, 3), (1, 12, 6, 3), (3, 5, 7, 3)])
    ]
    return GraphCase(
        g, {"loss": loss}, train, plan=plan, interesting=("c1/act:0", "c2/act:0", "c3/act:0")
    )


# https://github.com/tensorflow/tensorflow/issues/1388
# A tensor in the middle of the graph is fed; people expect the graph to use
# the fed value wherever the tensor is used.
# Must hold: a fed intermediate also reaches its consumers in the backward
# phase: a recomputed copy of it would ignore the feed.  (The runs with such a
# feed ask for gradients only.  With the train op they would be a race even
# un-rewritten: the pruned forward op is what else makes a weight be read
# before it is updated.)
@case
def feed_intermediate():
    g = tf.Graph()
    with g.as_default():
        x = v1.placeholder(tf.float32, [4, 8], "x")
        h1 = dense(x, 12, "d1", 1)
        h2 = dense(h1, 12, "d2", 3)
        h3 = dense(h2, 12, "d3", 5)
        loss = tf.reduce_mean(h3**2)
        tv = v1.trainable_variables()
        gs = tf.gradients(loss, tv)
        train = v1.train.GradientDescentOptimizer(0.2).apply_gradients(zip(gs, tv, strict=False))
        fetch = {"loss": loss}
        fetch.update({f"grad{i}": t for i, t in enumerate(gs)})
    f = {x: rand(1, 4, 8)}
    plan = [
        Run(train, None, f),
        Run(None, None, dict(f, **{"d2/act:0": rand(2, 4, 12)})),
        Run(train, None, f),
        Run(None, None, {"d2/act:0": rand(3, 4, 12), "d1/act:0": rand(4, 4, 12), x: f[x]}),
        Run(None, None, {"d3/act:0": rand(5, 4, 12), x: f[x]}),
        Run(train, None, f),
    ]
    return GraphCase(g, fetch, train, plan=plan, interesting=("d1/act:0", "d2/act:0", "d3/act:0"))


# https://github.com/tensorflow/tensorflow/pull/39042
# In the review of recompute_grad: count a side effect to learn how often the
# forward code really ran.
# Must hold: counter, print and assertion in the forward pass happen once a
# step; no consumer other than a control edge uses them.
@case
def forward_counter_print_assert():
    path = os.path.join(tempfile.mkdtemp(prefix="tflms_case_"), "print.txt")
    g = tf.Graph()
    with g.as_default():
        x = v1.placeholder(tf.float32, [4, 8], "x")
        ran = var("ran", np.int64(0), trainable=False)
        h = dense(x, 12, "d1", 1)
        with tf.control_dependencies(
            [
                ran.assign_add(1),
                tf.print("mean", tf.reduce_mean(h), output_stream="file://" + path),
                v1.assert_less(tf.abs(h), 1.01),
            ]
        ):
            h = tf.identity(h, "guarded")
        h = dense(h, 12, "d2", 3)
        loss = tf.reduce_mean(dense(h, 1, "d3", 5, None) ** 2)
        train = sgd(loss)

    seen = [0]

    def check(res):
        assert [int(r["var:ran:0"]) for r in res] == [1, 2, 3]
        with open(path) as f:
            lines = len(f.readlines())
        new, seen[0] = lines - seen[0], lines
        assert new == 3, f"printed {new} times in 3 steps"

    return GraphCase(
        g,
        {"loss": loss},
        train,
        {x: rand(1, 4, 8)},
        check=check,
        interesting=("guarded:0", "d2/act:0"),
    )


# https://github.com/tensorflow/tensorflow/issues/19272
# WGAN-GP: the loss holds the norm of a gradient, so a gradient is taken of
# the gradient; building and running this was far slower than expected.
# Must hold: what the first gradient pass makes is used by the second one as
# forward values; a rewriter that knows just two phases gets it wrong.
@case
def wgan_gradient_penalty():
    g = tf.Graph()
    with g.as_default():
        real = v1.placeholder(tf.float32, [5, 8], "real")
        fake = v1.placeholder(tf.float32, [5, 8], "fake")

        def critic(t):
            with v1.variable_scope("critic", reuse=v1.AUTO_REUSE):
                return dense(dense(dense(t, 16, "c1", 1), 16, "c2", 3), 1, "c3", 5, None)

        mix = 0.3 * real + 0.7 * fake
        slope = tf.gradients(critic(mix), mix, name="first")[0]
        norm = tf.sqrt(tf.reduce_sum(slope**2, 1) + 1e-8)
        pen = tf.reduce_mean((norm - 1.0) ** 2, name="penalty")
        loss = tf.reduce_mean(critic(fake) - critic(real)) + 10.0 * pen
        train = v1.train.AdamOptimizer(1e-2).minimize(loss)
    return GraphCase(
        g,
        {"loss": loss, "slope": slope, "penalty": pen},
        train,
        {real: rand(1, 5, 8), fake: rand(2, 5, 8)},
        interesting=("critic/c1/act:0", "critic/c2/act:0"),
    )


# https://github.com/cybertronai/gradient-checkpointing/pull/23
# For FP16 models the casts of the weights were taken for bottlenecks of the
# network and chosen as checkpoints.
# Must hold: float32 weights, float16 activations, scaled loss; a parked
# float16 tensor comes back as float16; casts of weights are no activations.
@case
def fp16_cast_static_scale():
    g = tf.Graph()
    with g.as_default():
        x = v1.placeholder(tf.float32, [6, 8], "x")
        y = v1.placeholder(tf.float32, [6, 1], "y")
        h = tf.cast(x, tf.float16)
        for i, (a, b) in enumerate([(8, 16), (16, 16), (16, 1)]):
            w = var(f"w{i}", rand(i, a, b, scale=a**-0.5))
            h = tf.matmul(h, tf.cast(w, tf.float16, name=f"cast_w{i}"))
            if i < 2:
                h = tf.nn.relu(h, f"h{i}")
        loss = tf.reduce_mean((tf.cast(h, tf.float32) - y) ** 2)
        opt = v1.train.MomentumOptimizer(0.05, 0.9)
        gv = opt.compute_gradients(loss * 256.0)
        train = opt.apply_gradients([(gr / 256.0, v) for gr, v in gv])
    return GraphCase(
        g,
        {"loss": loss},
        train,
        {x: rand(7, 6, 8), y: rand(8, 6, 1)},
        interesting=("h0:0", "h1:0"),
        untouchable=("cast_w0:0", "cast_w1:0"),
    )


# https://github.com/tensorflow/tensorflow/issues/7404
# A graph that comes from a file holds no Python objects of the program that
# built it; taking gradients of loops in it fails unless the meta graph, with
# its control flow records, was saved.
# Must hold: this graph was exported and imported before the rewriter sees it
# (no Python tensors, gradient functions or optimizer objects); the loop in
# it comes from control flow v1.
@case
def imported_metagraph_resume():
    path = os.path.join(tempfile.mkdtemp(prefix="tflms_case_"), "m.meta")
    first = tf.Graph()
    with first.as_default(), control_flow_v1():
        x = v1.placeholder(tf.float32, [3, 6], "x")
        h = dense(x, 8, "d1", 1)
        w = var("loop_w", rand(3, 8, 8, scale=0.4))
        _, h = v1.while_loop(
            lambda i, h: i < 4, lambda i, h: (i + 1, tf.tanh(h @ w)), [0, h], name="loop"
        )
        h = dense(h, 8, "d2", 5)
        loss = tf.reduce_mean(h**2, name="loss")
        train = v1.train.AdamOptimizer(0.01).minimize(loss, name="train")
        init = v1.global_variables_initializer()
        v1.add_to_collection("run_me", train)
        v1.train.export_meta_graph(path)
    g = tf.Graph()
    with g.as_default():
        v1.train.import_meta_graph(path)
        train = v1.get_collection("run_me")[0]
    return GraphCase(
        g,
        {"loss": g.get_tensor_by_name("loss:0")},
        train,
        {"x:0": rand(7, 3, 6)},
        init=[g.get_operation_by_name(init.name)],
        interesting=("d1/act:0", "d2/act:0"),
    )


# https://github.com/cybertronai/gradient-checkpointing/issues/38
# A model cut over two devices: after the rewrite, gradient and recomputed
# ops had no device and all ended up on the first one, which ran out.
# Must hold: old ops keep their device, copies get that of their original,
# and a tensor comes back to the device that uses it (two CPU devices here;
# devices_of() before and after).
@case
def model_parallel_two_devices():
    g = tf.Graph()
    with g.as_default():
        with tf.device("/CPU:0"):
            x = v1.placeholder(tf.float32, [4, 8], "x")
            h = dense(dense(x, 16, "a1", 1), 16, "a2", 3)
        with tf.device("/CPU:1"):
            h = dense(dense(h, 16, "b1", 5), 16, "b2", 7)
            loss = tf.reduce_mean(dense(h, 1, "b3", 9, None) ** 2)
        train = sgd(loss, colocate_gradients_with_ops=True)
    return GraphCase(
        g,
        {"loss": loss},
        train,
        {x: rand(11, 4, 8)},
        config=v1.ConfigProto(device_count={"CPU": 2}),
        interesting=("a1/act:0", "a2/act:0", "b1/act:0"),
        extra={"devices": devices_of(g)},
    )


# https://github.com/tensorflow/tensorflow/issues/21669
# Clipping by global norm ties all gradients together; it shows up in
# placement errors and in peak memory.
# Must hold: every update waits for every gradient, so a swap-in must not be
# triggered by an op that stands behind the clip (that would be a cycle).
@case
def clip_by_global_norm():
    g = tf.Graph()
    with g.as_default():
        x = v1.placeholder(tf.float32, [4, 8], "x")
        h = x
        for i in range(5):
            h = dense(h, 12, f"d{i}", 2 * i)
        loss = tf.reduce_sum(h**2)
        tv = v1.trainable_variables()
        grads, norm = tf.clip_by_global_norm(tf.gradients(loss, tv), 0.5)
        step = v1.train.create_global_step()
        lr = v1.train.exponential_decay(0.1, step, 2, 0.5)
        train = v1.train.MomentumOptimizer(lr, 0.9).apply_gradients(
            zip(grads, tv, strict=False), global_step=step
        )
    return GraphCase(
        g,
        {"loss": loss, "norm": norm, "lr": lr},
        train,
        {x: rand(30, 4, 8)},
        interesting=tuple(f"d{i}/act:0" for i in range(5)),
    )


# https://github.com/keras-team/keras/issues/15596
# Models of about a thousand layers in a row break code that walks the graph
# by recursion.
# Must hold: no RecursionError at Python's default limit, and the time for
# the rewrite grows about linearly (extra: number of layers).
@case
def chain_1000_layers():
    n = 1000
    g = tf.Graph()
    with g.as_default():
        x = v1.placeholder(tf.float32, [2, 4], "x")
        h = dense(x, 4, "first", 1)
        for i in range(n):
            h = tf.raw_ops.Tanh(x=h, name=f"h{i}")
        loss = tf.reduce_mean(dense(h, 1, "last", 3, None) ** 2)
        train = sgd(loss * 1e3, 1e-4)
    return GraphCase(
        g,
        {"loss": loss},
        train,
        {x: rand(5, 2, 4)},
        steps=2,
        interesting=("h0:0", "h500:0", "h998:0"),
        extra={"layers": n},
    )


# https://github.com/bjherger/keras-pandas/issues/83
# Column names with blanks and brackets became layer names; TensorFlow only
# allows some characters, but those include dots, dashes, slashes and ">".
# Must hold: names that a rewriter makes out of old ones are valid and new;
# "name:1" and "^name" are taken apart rightly (a scope here is called "0").
@case
def odd_scope_names():
    g = tf.Graph()
    with g.as_default():
        x = v1.placeholder(tf.float32, [4, 8], "in.put")
        h = x
        for i, s in enumerate(
            ["block.0", "conv-3x3", "x->y", "9.9", "0", "UPPER", "a.b/c-d_1", "h_1", "_deep"]
        ):
            with tf.name_scope("m"), tf.name_scope(s):
                w = tf.Variable(rand(i, 8, 8, scale=0.4), name="w")
                h, extra = tf.split(tf.tanh(h @ w), 2, 1, name="1")
                h = tf.concat([h, tf.nn.relu(extra)], 1, name="_1")
        loss = tf.reduce_mean(h**2, name="loss_1")
        train = sgd(loss)
        names = tuple(
            op.outputs[0].name
            for op in g.get_operations()
            if op.type == "ConcatV2" and op.name.endswith("_1")
        )
    return GraphCase(g, {"loss": loss}, train, {x: rand(20, 4, 8)}, interesting=names)


# https://github.com/tensorflow/tensorflow/issues/6774
# After a second import of a graph its variables got a suffix while the
# collection and the saver still used the old names.
# Must hold: a checkpoint written from the rewritten graph restores into the
# un-rewritten one and back; the saver, made before the rewrite, still works,
# and so does the merged summary (bytes are compared).
@case
def saver_and_summaries():
    def build():
        g = tf.Graph()
        with g.as_default():
            x = v1.placeholder(tf.float32, [4, 8], "x")
            h = dense(dense(x, 12, "d1", 1), 12, "d2", 3)
            loss = tf.reduce_mean(dense(h, 1, "d3", 5, None) ** 2, name="loss")
            with tf.control_dependencies([loss]):
                v1.summary.scalar("loss", loss)
                v1.summary.histogram("h", h)
            train = v1.train.AdamOptimizer(0.01).minimize(loss, name="train")
            saver = v1.train.Saver(name="keep")
            merged = v1.summary.merge_all()
        return g, x, loss, train, saver, merged

    g, x, loss, train, saver, merged = build()

    def after(sess, graph, case):
        path = os.path.join(tempfile.mkdtemp(prefix="tflms_case_"), "ckpt")
        sd = saver.saver_def
        sess.run(sd.save_tensor_name, {sd.filename_tensor_name: path})
        names = sorted(n for n, _ in tf.train.list_variables(path))
        assert names == sorted(n[:-2] for n in case.reads), names
        g2, _, _, _, saver2, _ = build()
        with v1.Session(graph=g2) as s2:
            saver2.restore(s2, path)
            for n, t in case.reads.items():
                np.testing.assert_array_equal(s2.run(t), sess.run(graph.as_graph_element(t)), n)
        sess.run(sd.restore_op_name, {sd.filename_tensor_name: path})

    return GraphCase(
        g,
        {"loss": loss, "summary": merged},
        train,
        {x: rand(9, 4, 8)},
        after=after,
        interesting=("d1/act:0", "d2/act:0"),
    )


# https://github.com/tensorflow/tensorflow/issues/11163
# A swap-out node that grappler had added lacked its type attribute, and the
# rewritten graph could not be imported.
# Must hold: every output slot is looked at on its own: here slots 1, 2, 5 of
# Split, TopKV2, FusedBatchNormV3 and Unpack go to the backward phase, partly
# with different dtypes (float and int32) in one op.
@case
def multi_output_split_slots():
    g = tf.Graph()
    with g.as_default():
        x = v1.placeholder(tf.float32, [4, 6, 6, 6], "x")
        h = conv(x, 6, "c1", 1, act=None)
        h, bm, _bv = v1.nn.fused_batch_norm(
            h, var("gamma", np.ones(6, np.float32)), var("beta", np.zeros(6, np.float32))
        )
        a, b, c = tf.split(tf.nn.relu(h, "r"), 3, 3, name="three")
        m = a * tf.sigmoid(b) + c * b
        rows = tf.unstack(tf.reduce_mean(m, [2]), axis=1, name="rows")
        t = tf.add_n([r * rows[(i + 1) % 6] for i, r in enumerate(rows)])
        val, idx = tf.nn.top_k(tf.reshape(m, [4, 72]), 5, name="top")
        loss = tf.reduce_mean(t**2) + tf.reduce_mean(val**2)
        train = sgd(loss)
    return GraphCase(
        g,
        {"loss": loss, "idx": idx, "bm": bm},
        train,
        {x: rand(3, 4, 6, 6, 6)},
        interesting=("r:0", "three:1", "three:2"),
    )


# https://github.com/PaddlePaddle/Paddle/pull/69585
# A saved tensor was asked for twice in the backward pass, and the second
# time it was empty, as the first caller had taken it away.
# Must hold: one activation is used at eight places of the forward pass and,
# early and late, in the backward phase; each gets the same value, whether it
# shares a swap-in with others or has its own.
@case
def many_backward_consumers():
    g = tf.Graph()
    with g.as_default():
        x = v1.placeholder(tf.float32, [5, 8], "x")
        h = dense(x, 10, "hub", 1)
        z = h
        for i in range(8):
            z = tf.tanh(z * h + dense(z, 10, f"d{i}", 3 + 2 * i, None), name=f"z{i}")
        loss = tf.reduce_mean(z**2) + 0.1 * tf.reduce_mean(h**4)
        train = sgd(loss, 0.3)
    return GraphCase(
        g,
        {"loss": loss, "h": h},
        train,
        {x: rand(40, 5, 8)},
        interesting=("hub/act:0", "z0:0", "z6:0"),
    )


# https://github.com/cybertronai/gradient-checkpointing/issues/22
# On VGG nets nothing was saved: almost all memory is in the first layers,
# and the pooling ops came last in the order that the tool had worked out.
# (IBM/tensorflow-large-model-support#12: TF's dependency optimizer removed
# the identity ops that did the swapping.)
# Must hold: for each budget below the sum, the plan begins with the first
# block (extra: bytes by tensor); after the session's own graph optimizers
# have run, the swap ops are still there (trace a run to see).
@case
def vgg_front_heavy():
    g = tf.Graph()
    with g.as_default():
        x = v1.placeholder(tf.float32, [2, 32, 32, 3], "x")
        h, size = x, {}
        for i, f in enumerate([4, 4, 8, 8]):
            h = conv(h, f, f"c{i}", 2 * i)
            size[h.name] = int(np.prod(h.shape)) * 4
            if i % 2:
                h = tf.nn.max_pool2d(h, 2, 2, "SAME", name=f"pool{i}")
                size[h.name] = int(np.prod(h.shape)) * 4
        h = tf.reshape(h, [2, 8 * 8 * 8])
        loss = tf.reduce_mean(dense(h, 10, "fc", 20, None) ** 2)
        train = v1.train.MomentumOptimizer(0.05, 0.9).minimize(loss)
    return GraphCase(
        g,
        {"loss": loss},
        train,
        {x: rand(30, 2, 32, 32, 3)},
        interesting=("c0/act:0", "c1/act:0"),
        extra={"activation_bytes": size},
    )


# https://github.com/huggingface/transformers/issues/16276
# Layers were frozen, yet under checkpointing the run behaved as if they were
# not.
# Must hold: only the variables in var_list get a gradient; no backward op is
# added for the frozen part, and its activations (which the backward phase
# does not use) are not parked.
@case
def frozen_backbone():
    g = tf.Graph()
    with g.as_default():
        x = v1.placeholder(tf.float32, [4, 8], "x")
        h = x
        for i in range(4):
            h = dense(h, 12, f"frozen{i}", 2 * i)
        top = dense(h, 12, "tuned", 20)
        side = tf.stop_gradient(dense(h, 12, "probe", 22))
        loss = tf.reduce_mean(dense(top * side, 1, "head", 24, None) ** 2)
        tv = [v for v in v1.trainable_variables() if v.name.startswith(("tuned", "head"))]
        train = sgd(loss, 0.2, var_list=tv)

    def check(res):
        for n in ("frozen0/w:0", "frozen3/b:0", "probe/w:0"):
            assert np.array_equal(res[0]["var:" + n], res[-1]["var:" + n])
        assert not np.array_equal(res[0]["var:tuned/w:0"], res[-1]["var:tuned/w:0"])

    return GraphCase(
        g,
        {"loss": loss},
        train,
        {x: rand(30, 4, 8)},
        check=check,
        interesting=("tuned/act:0",),
        extra={"not_needed_in_backward": ["frozen0/act:0", "frozen1/act:0", "frozen2/act:0"]},
    )


# https://github.com/tensorflow/tensorflow/issues/3710
# A function with a gradient of its own, and gradients that came out other
# than the author had meant.
# Must hold: the gradient stays the written one (straight-through for sign,
# halved for the second function), though the forward ops would give another;
# the second function also has a variable.
@case
def custom_gradient_straight_through():
    g = tf.Graph()
    with g.as_default():
        x = v1.placeholder(tf.float32, [4, 8], "x")

        @tf.custom_gradient
        def hard_sign(t):
            return tf.sign(t), lambda dy: dy * tf.cast(tf.abs(t) < 1.0, tf.float32)

        w2 = var("w2", rand(5, 12, 12, scale=0.3), use_resource=True)

        @tf.custom_gradient
        def half(t):
            y = tf.tanh(tf.matmul(t, w2))

            def grad(dy, variables=None):
                d = dy * (1.0 - y * y)
                return (
                    0.5 * tf.matmul(d, w2, transpose_b=True),
                    [tf.matmul(t, d, transpose_a=True) for _ in variables],
                )

            return y, grad

        h = hard_sign(dense(x, 12, "d1", 1))
        h = half(h + dense(x, 12, "d2", 3))
        loss = tf.reduce_mean((dense(h, 1, "d3", 7, None) - 1.0) ** 2)
        train = sgd(loss, 0.2)
    return GraphCase(
        g, {"loss": loss}, train, {x: rand(9, 4, 8)}, interesting=("d1/act:0", "d2/act:0")
    )


# https://github.com/IBM/tensorflow-large-model-support/issues/33
# What was swapped out filled the host's memory and the system stopped; a
# limit for the host side had been ignored or did not exist.
# (parasj/checkmate#144: a budget that cannot be met must be said so clearly.)
# Must hold: with a limit of extra["host_bytes"] at most two of the equal
# activations are parked at one time; a device budget below
# extra["smallest_step_bytes"] is refused with an error that names the op.
@case
def host_budget_chain():
    n, width = 6, 64
    g = tf.Graph()
    with g.as_default():
        x = v1.placeholder(tf.float32, [64, width], "x")
        h = x
        for i in range(n):
            h = dense(h, width, f"d{i}", 2 * i)
        loss = tf.reduce_mean(h**2)
        train = sgd(loss)
    one = 64 * width * 4
    return GraphCase(
        g,
        {"loss": loss},
        train,
        {x: rand(50, 64, width)},
        interesting=tuple(f"d{i}/act:0" for i in range(n)),
        extra={
            "activation_bytes": {f"d{i}/act:0": one for i in range(n)},
            "host_bytes": 2 * one,
            "smallest_step_bytes": 3 * one,
        },
    )
