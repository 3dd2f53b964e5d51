from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.local_updates.local_nets import losses
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
    with pytest.raises(ConfigError, match="one copy at one time"):
        LocalTrainer(model, split(model, chunks=2), heads="lm_tied", runtime="threads")
