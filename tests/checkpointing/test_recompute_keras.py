"""fit with recomputation: the same losses, weights, masks and moving statistics, bit by bit."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tflms
from tests.support.emulated import run_on_emulator
from tflms.errors import ConfigError

KINDS = (
    "dropout_and_statistics",
    "tokens",
    "convolutional",
    "frozen_first_layers",
    "several_inputs_and_outputs",
    "mixed_precision",
)
# In a process of its own, where operations run one at a time: else plain training does not always
# equal itself, as the sum of several gradients starts with the one that is there first.
CODE = """
import tflms
from tests.checkpointing import nets

tf.config.threading.set_inter_op_parallelism_threads(1)
result = {}
for kind in kinds:
    build = getattr(nets, kind)
    plain = nets.train(build)
    for config in ({"strategy": "recompute_all"}, {"strategy": "periodic"}):
        callback = tflms.keras.LargeModelSupport({**config, "batch_size": nets.BATCH})
        found = nets.train(build, callback)
        report = callback.report
        result[f"{kind} {config['strategy']}"] = {
            "differs": [key for key in plain if found.get(key) != plain[key]],
            "recomputed": len(report.recomputes),
            "alive": report.survival is not None and report.survival.ok,
            "notes": report.notes,
        }
"""


@pytest.fixture(scope="module")
def trained():
    return run_on_emulator(CODE, memory_bytes=None, kinds=KINDS)


@pytest.mark.parametrize("strategy", ["recompute_all", "periodic"])
@pytest.mark.parametrize("kind", KINDS)
def test_fit_gives_the_same_numbers_whatever_is_recomputed(trained, kind, strategy):
    found = trained[f"{kind} {strategy}"]
    assert found["differs"] == []
    if found["recomputed"]:
        assert found["alive"]
    else:  # the least that is kept may be more than what is kept as it is, in so small a net
        assert strategy == "recompute_all"
        assert any("predicts a peak" in note for note in found["notes"]), found["notes"]


def test_a_function_recomputes_as_a_model_does():
    weights = [tf.Variable(tf.random.stateless_normal([32, 32], [i, 0])) for i in range(6)]
    x = tf.random.stateless_normal([256, 32], [7, 0])

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for w in weights:
                h = tf.nn.dropout(tf.nn.relu(h @ w), 0.1, seed=3)
            loss = tf.reduce_mean(tf.square(h))
        return loss, tape.gradient(loss, weights)

    tf.random.set_seed(5)
    plain = tf.function(step)
    expected = [plain(x) for _ in range(2)]
    tf.random.set_seed(5)
    ours = tflms.function(step, {"strategy": "optimal_checkpointing", "memory_limit": 0.7})
    found = [ours(x) for _ in range(2)]
    assert ours.report().recomputes
    assert not any(op.startswith("RandomUniform") for op in _types(ours.report()))
    for a, b in zip(tf.nest.flatten(expected), tf.nest.flatten(found), strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()
    masks = {loss.numpy().tobytes() for loss, _ in found}
    assert len(masks) == 2, "each step draws masks of its own"


def _types(report):
    return [recompute.op.rpartition("/")[2] for recompute in report.recomputes]


def test_gradients_of_embeddings_stay_sparse():
    table = tf.Variable(tf.random.stateless_normal([50, 16], [1, 1]))
    weights = [tf.Variable(tf.random.stateless_normal([16, 16], [i, 2])) for i in range(6)]
    ids = tf.constant([[i % 50 for i in range(128)]])

    def step(ids):
        with tf.GradientTape() as tape:
            h = tf.gather(table, ids)
            for w in weights:
                h = tf.nn.relu(tf.linalg.matmul(h, w))
            loss = tf.reduce_mean(tf.square(h))
        gradients = tape.gradient(loss, [table, *weights])
        assert isinstance(gradients[0], tf.IndexedSlices)
        return loss, gradients

    expected = tf.function(step)(ids)
    ours = tflms.function(step, {"strategy": "recompute_all"})
    found = ours(ids)
    assert ours.report().recomputes
    assert isinstance(found[1][0], tf.IndexedSlices)
    flat = [tf.nest.flatten(r, expand_composites=True) for r in (expected, found)]
    for a, b in zip(*flat, strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()


def test_xla_is_refused():
    with pytest.raises(ConfigError, match="jit_compile"):
        tflms.function(lambda x: x, {"strategy": "recompute_all"}, jit_compile=True)
