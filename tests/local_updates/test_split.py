from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest

from tests.local_updates.local_nets import mlp, residual
from tflms.errors import ConfigError, GraphError
from tflms.local_updates import split
from tflms.local_updates.balance import balanced_cuts

layers = keras.layers


def forward(plan, x):
    tensors = [x]
    for net in plan.nets:
        made = keras.tree.flatten(net.model(tensors if len(tensors) > 1 else tensors[0]))
        source = {"in": tensors, "out": made}
        tensors = [source[kind][position] for kind, position in net.routes]
    return tensors[0]


def test_the_chunks_in_a_row_compute_what_the_model_computes():
    model = residual()
    x = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype("float32")
    for chunks in (1, 2, 3, 4):
        plan = split(model, chunks=chunks)
        assert len(plan.chunks) == chunks
        np.testing.assert_array_equal(forward(plan, x), model(x))


def test_automatic_cuts_of_a_residual_network_are_crossed_by_one_tensor():
    plan = split(residual())
    assert [cut.tensors for cut in plan.cuts] == [("stem",), ("add_0",), ("add_1",), ("pool",)]


def test_every_layer_is_in_one_chunk_and_parameters_add_up():
    model = residual()
    plan = split(model, chunks=3)
    named = [name for chunk in plan.chunks for name in chunk.layers]
    assert sorted(named) == sorted(layer.name for layer in model.layers if layer.name != "image")
    assert sum(chunk.parameters for chunk in plan.chunks) == sum(
        int(np.prod(v.shape)) for v in model.trainable_variables
    )


def test_flops_and_kept_bytes_of_a_dense_network_follow_from_its_sizes():
    model = mlp(depth=2, width=32, inputs=16, classes=5, dropout=0, norm=False)
    plan = split(model, chunks=2, batch_size=10)
    assert [cut.nbytes for cut in plan.cuts] == [10 * 32 * 4]
    assert sum(chunk.flops for chunk in plan.chunks) == 2 * 10 * (16 * 32 + 32 * 32 + 32 * 5)
    # What backpropagation keeps: each ReLU's output, and the input, which is no activation.
    assert sum(chunk.activation_bytes for chunk in plan.chunks) == 2 * 10 * 32 * 4


def test_the_search_for_balanced_cuts_finds_the_optimum_of_all_choices():
    random = np.random.default_rng(3)
    for _ in range(20):
        costs = random.integers(1, 20, 8)
        sizes = random.integers(1, 9, 8)
        chunks = int(random.integers(2, 5))

        def of(positions, costs=costs, sizes=sizes):
            borders = [0, *positions, 8]
            worst = max(costs[a:b].sum() for a, b in itertools.pairwise(borders))
            return worst, sum(sizes[p] for p in positions)

        best = min(of(choice) for choice in itertools.combinations(range(1, 8), chunks - 1))
        found = balanced_cuts(
            range(1, 8),
            chunks=chunks,
            end=8,
            cost=lambda a, b, costs=costs: float(costs[a:b].sum()),
            cut_bytes=lambda p, sizes=sizes: float(sizes[p]),
        )
        assert of(found) == best


def test_balance_by_memory_may_cut_elsewhere_than_balance_by_time():
    keras.utils.set_random_seed(0)
    entry = keras.Input((32, 32, 4))
    tensor = layers.Conv2D(4, 1, activation="tanh", name="wide")(entry)  # much memory, little work
    tensor = layers.Conv2D(4, 1, activation="tanh", name="wide_2")(tensor)
    tensor = layers.Flatten()(layers.AveragePooling2D(8)(tensor))
    tensor = layers.Dense(512, activation="relu", name="work")(tensor)
    tensor = layers.Dense(512, activation="relu", name="work_2")(tensor)
    model = keras.Model(entry, layers.Dense(5)(tensor))
    by_time = split(model, chunks=2, balance="time", batch_size=256)
    by_memory = split(model, chunks=2, balance="memory", batch_size=256)
    assert "work" in by_memory.chunks[1].layers
    assert "work" in by_time.chunks[0].layers
    worst = [max(p.memory(i) for i in range(2)) for p in (by_time, by_memory)]
    assert worst[1] < worst[0]


def test_a_cut_over_tied_weights_is_refused_with_their_names():
    shared = layers.Dense(16, name="shared")
    entry = keras.Input((16,))
    tensor = layers.Dense(16, name="between")(shared(entry))
    model = keras.Model(entry, layers.Dense(3, name="last")(shared(tensor)))
    with pytest.raises(GraphError, match=r"shared/kernel.*both sides"):
        split(model, at=["between"])
    plan = split(model, chunks=2)  # the legal place behind both uses is found
    assert plan.chunks[0].layers.count("shared") == 2
    with pytest.raises(ConfigError, match=r"cannot be cut into 3.*shared/kernel"):
        split(model, chunks=3)


def test_a_cut_may_be_crossed_by_several_tensors_and_by_a_model_input():
    keras.utils.set_random_seed(0)
    first, second = keras.Input((8,), name="first"), keras.Input((8,), name="second")
    a = layers.Dense(8, name="a")(first)
    b = layers.Dense(8, name="b")(first)
    c = layers.Dense(8, name="c")(layers.Add()([a, b]))
    out = layers.Dense(3, name="out")(layers.Concatenate()([c, second]))
    model = keras.Model([first, second], out)
    plan = split(model, at=[("a", "b")])
    assert set(plan.cuts[0].tensors) == {"a", "b", "second"}
    x = [keras.ops.ones((2, 8)), keras.ops.full((2, 8), 2.0)]
    tensors = x
    for net in plan.nets:
        made = keras.tree.flatten(net.model(tensors))
        tensors = [{"in": tensors, "out": made}[kind][i] for kind, i in net.routes]
    np.testing.assert_array_equal(tensors[0], model(x))


def test_nested_models_are_cut_inside():
    inner = mlp(depth=3, dropout=0)
    model = keras.Sequential([keras.Input((16,)), inner, layers.Dense(2, name="after")])
    plan = split(model, chunks=3)
    x = np.ones((2, 16), "float32")
    np.testing.assert_allclose(forward(plan, x), model(x), rtol=1e-6)
    assert {"dense_0", "dense_1", "dense_2"} <= {n for c in plan.chunks for n in c.layers}


def test_masks_do_not_cross_cuts_in_silence():
    entry = keras.Input((6,), dtype="int32")
    tensor = layers.Embedding(10, 8, mask_zero=True, name="words")(entry)
    tensor = layers.LSTM(8, name="reader")(tensor)
    model = keras.Model(entry, layers.Dense(2)(tensor))
    with pytest.raises(GraphError, match="mask"):
        split(model, at=["words"])


def test_the_printed_plan_names_layers_cuts_and_memory():
    plan = split(residual(), chunks=2)
    text = str(plan)
    assert "add_" in text and "parameters" in text and "memory" in text
    assert len(text.splitlines()) == 4


def test_predicted_memory_is_the_formula_of_weights_activations_and_waiting_batches():
    plan = split(mlp(norm=False, dropout=0), chunks=2, batch_size=8)
    chunk, cut = plan.chunks[1], plan.cuts[0]
    expected = chunk.parameters * 4 * 4 + chunk.activation_bytes * 2 + 2 * cut.nbytes * (3 + 2)
    assert plan.memory(1, batch_size=16, queue_size=3, slots=2) == expected


def test_wrong_requests_say_what_is_allowed():
    model = mlp()
    with pytest.raises(ConfigError, match="did you mean 'dense_1'"):
        split(model, at=["dense1"])
    with pytest.raises(ConfigError, match="cannot be cut into 30"):
        split(model, chunks=30)
    with pytest.raises(ConfigError, match="no number of chunks"):
        split(model, chunks="2")
    with pytest.raises(ConfigError, match="a name per cut"):
        split(model, at="relu_0")
    with pytest.raises(ConfigError, match="'time' or 'memory'"):
        split(model, chunks=2, balance="size")
    with pytest.raises(ConfigError, match="not both"):
        split(model, chunks=2, at=["relu_0"])
    with pytest.raises(ConfigError, match="order of the network"):
        split(model, at=["relu_1", "relu_0"])
    with pytest.raises(GraphError, match="2 outputs"):
        entry = keras.Input((4,))
        split(keras.Model(entry, [layers.Dense(1)(entry), layers.Dense(1)(entry)]))
    with pytest.raises(GraphError, match="not built"):
        split(keras.Sequential([layers.Dense(2)]))
