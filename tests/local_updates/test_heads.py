from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.local_updates.local_nets import data, losses, mlp
from tflms.errors import ConfigError
from tflms.local_updates import LocalTrainer, make_head, split

layers = keras.layers


def language_model(vocabulary=20, width=8, length=6):
    keras.utils.set_random_seed(0)
    entry = keras.Input((length,), dtype="int32")
    words = layers.Embedding(vocabulary, width, name="words")
    tensor = words(entry)
    for index in range(3):
        inner = layers.Dense(width, activation="relu", name=f"dense_{index}")(tensor)
        tensor = layers.Add(name=f"add_{index}")([tensor, inner])
    return keras.Model(entry, layers.Dense(vocabulary, name="logits")(tensor)), words


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("pool_linear", (None, 4, 4, 6)),
        ("pool_linear", (None, 6)),
        ("mlp", (None, 4, 4, 6)),
        ("conv", (None, 5, 4, 6)),
    ],
)
def test_classifier_heads_give_one_vector_an_example(kind, shape):
    outputs = layers.Dense(7, activation="softmax")(keras.Input((3,)))
    head = make_head(kind, shape, outputs=outputs)
    found = np.asarray(head(np.ones((2, *shape[1:]), "float32")))
    assert found.shape == (2, 7)
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)  # it ends as the model ends


@pytest.mark.parametrize("sizes", [(8,), (8, 4), (8, 4, 2)])
@pytest.mark.parametrize("kind", ["pool_linear", "mlp"])
def test_heads_of_a_segmentation_give_one_vector_a_position_of_the_output(kind, sizes):
    outputs = keras.Input((*sizes, 3))
    shape = (None, *[size // 2 for size in sizes], 5)  # behind an encoder: half the positions
    head = make_head(kind, shape, outputs=outputs)
    assert head.output_shape == (None, *sizes, 3)
    assert make_head(kind, (None, *sizes, 5), outputs=outputs).output_shape == (None, *sizes, 3)
    with pytest.raises(ConfigError, match="heads= a function"):
        make_head(kind, (None, 5), outputs=outputs)
    with pytest.raises(ConfigError, match="heads= a function"):
        make_head(kind, (None, *[3 for _ in sizes], 5), outputs=outputs)


@pytest.mark.parametrize("kind", ["lm_linear", "lm_lowrank", "lm_tied"])
def test_language_heads_give_logits_at_each_position_and_train(kind):
    model, words = language_model()
    table = np.asarray(words.embeddings).copy()
    options = {"table": words.embeddings} if kind == "lm_tied" else {}
    trainer = LocalTrainer(
        model, split(model, chunks=2), heads=kind, head_options={"rank": 3, **options}
    )
    trainer.compile(optimizer=keras.optimizers.Adam(1e-2), loss=losses())
    tokens = np.random.default_rng(0).integers(0, 20, (64, 6))
    history = trainer.fit(tokens, tokens, epochs=3, verbose=0).history
    assert history["loss_0"][-1] < history["loss_0"][0]
    assert not np.array_equal(table, np.asarray(words.embeddings))  # by its own block


def test_a_low_rank_head_is_smaller_and_a_tied_head_has_no_table_of_its_own():
    model, words = language_model(vocabulary=1000, width=64)
    shape, outputs = (None, 6, 64), model.outputs[0]
    count = {
        kind: make_head(kind, shape, outputs=outputs, rank=8, table=words.embeddings).count_params()
        for kind in ("lm_linear", "lm_lowrank", "lm_tied")
    }
    assert count["lm_linear"] == 2 * 64 + 64 * 1000 + 1000
    assert count["lm_lowrank"] == 2 * 64 + 64 * 8 + 8 * 1000 + 1000
    assert count["lm_tied"] == 2 * 64


def test_the_tied_table_gets_no_gradient_from_a_head():
    model, words = language_model()
    model.get_layer("words").trainable = False
    trainer = LocalTrainer(
        model, split(model, chunks=2), heads="lm_tied", head_options={"table": words.embeddings}
    )
    trainer.compile(optimizer="sgd", loss=losses())
    before = np.asarray(words.embeddings).copy()
    tokens = np.random.default_rng(0).integers(0, 20, (32, 6))
    trainer.fit(tokens, tokens, verbose=0)
    np.testing.assert_array_equal(before, np.asarray(words.embeddings))


def test_zero_heads_start_at_logits_of_zero():
    outputs = layers.Dense(7)(keras.Input((3,)))
    head = make_head("mlp", (None, 4), outputs=outputs, initializer="zero")
    np.testing.assert_array_equal(np.asarray(head(np.ones((2, 4), "float32"))), np.zeros((2, 7)))


class Similar(layers.Layer):
    """Similarity matching: features of one class shall look alike (see the docs)."""

    def __init__(self):
        super().__init__()
        self.classify = layers.Dense(5)

    def build(self, shape):
        self.classify.build(shape)

    def call(self, features):
        return self.classify(features)

    def local_loss(self, inputs, features, labels):
        def likeness(rows):
            rows = keras.ops.normalize(rows - keras.ops.mean(rows, axis=1, keepdims=True))
            return rows @ keras.ops.transpose(rows)

        difference = likeness(features) - likeness(keras.ops.one_hot(labels, 5))
        return 10 * keras.ops.mean(difference**2)


class Rebuilding(Similar):
    """Reconstruction of what entered the chunk, by a decoder of its own."""

    def __init__(self, width):
        super().__init__()
        self.decode = layers.Dense(width)

    def build(self, shape):
        super().build(shape)
        self.decode.build(shape)

    def local_loss(self, inputs, features, labels):
        return keras.ops.mean((self.decode(features) - inputs[0]) ** 2)


def test_a_head_adds_a_loss_of_features_labels_and_the_chunks_input():
    x, _ = data()
    y = x[:, :5].argmax(1).astype("int32")
    trained = {}
    kinds = {"plain": "pool_linear", "similar": Similar, "rebuild": lambda: Rebuilding(16)}
    for name, kind in kinds.items():
        model = mlp(depth=2, dropout=0, norm=False)
        heads = kind if isinstance(kind, str) else lambda shape, kind=kind: kind()
        trainer = LocalTrainer(model, split(model, at=["relu_0"]), heads=heads)
        trainer.compile(optimizer=keras.optimizers.Adam(1e-2), loss=losses())
        trainer.fit(x, y, epochs=30, batch_size=32, verbose=0)
        found = trainer.stages[0].forward([tf.constant(x)], training=False)[0]
        trained[name] = {
            "similar": float(Similar().local_loss(None, found, y)),
            "variables": len(trainer.stages[0].exit.trainable_variables),
        }
        if name == "rebuild":
            head = trainer.stages[0].exit.head.layers[-1]
            error = float(head.local_loss([tf.constant(x)], found, y))
            assert error < 0.5 * float(np.mean(x**2))  # the decoder has learnt
    assert trained["similar"]["similar"] < 0.8 * trained["plain"]["similar"]
    assert [t["variables"] for t in trained.values()] == [2, 2, 4]


@pytest.mark.parametrize("runtime", ["threads", "duplicates"])
def test_a_heads_own_loss_counts_in_every_runtime_and_form(runtime):
    x, y = data()
    found = []
    for options in ({}, {"form": runtime} if runtime == "duplicates" else {"runtime": runtime}):
        model = mlp(depth=2, dropout=0, norm=False)
        trainer = LocalTrainer(
            model,
            split(model, at=["relu_0", "relu_1"]),
            method="overlapping",
            heads=lambda shape: Rebuilding(32),
            **options,
        )
        trainer.compile(optimizer=keras.optimizers.SGD(0.01), loss=losses())
        keras.utils.set_random_seed(3)
        trainer.fit(x, y, batch_size=32, verbose=0)
        found.append([np.asarray(v) for v in model.variables])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_heads_that_do_not_fit_say_why():
    outputs = layers.Dense(7)(keras.Input((3,)))
    with pytest.raises(ConfigError, match="'linear' is unknown"):
        make_head("linear", (None, 4), outputs=outputs)
    with pytest.raises(ConfigError, match="batch, positions, width"):
        make_head("lm_linear", (None, 4), outputs=outputs)
    with pytest.raises(ConfigError, match="height"):
        make_head("conv", (None, 4), outputs=outputs)
    with pytest.raises(ConfigError, match="must return a Keras model"):
        make_head(lambda shape: 3, (None, 4), outputs=outputs)
    with pytest.raises(ConfigError, match="needs table="):
        make_head("lm_tied", (None, 6, 4), outputs=outputs)
    model, _ = language_model()
    with pytest.raises(ConfigError, match="not depth, rnk"):
        LocalTrainer(model, split(model, chunks=2), head_options={"rnk": 3, "depth": 1})
    with pytest.raises(ConfigError, match="one copy at one time"):
        LocalTrainer(model, split(model, chunks=2), heads="lm_tied", runtime="threads")
