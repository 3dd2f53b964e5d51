"""The training graphs of the zoo: they train, repeat themselves, and stay where they are put."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tflms.errors import ConfigError
from tflms.zoo import graphs

v1 = tf.compat.v1

SMALL = {
    "mlp": lambda **settings: graphs.mlp(4, 16, batch=8, **settings),
    "unet3d": lambda **settings: graphs.unet3d(8, 2, levels=3, **settings),
    "resnet50": lambda **settings: graphs.resnet50(
        32, 4, classes=5, width=4, stages=(1, 1), **settings
    ),
    "deep_resnet": lambda **settings: graphs.deep_resnet(11, 8, 4, filters=2, **settings),
}


def losses_of(built, steps=4):
    with v1.Session(graph=built.graph) as session:
        session.run(built.init_op)
        return [
            session.run([built.loss, built.train_op], built.feed_dict(step))[0]
            for step in range(steps)
        ]


@pytest.mark.parametrize("name", sorted(SMALL))
def test_the_loss_falls_and_a_second_build_repeats_it(name):
    first, again = losses_of(SMALL[name]()), losses_of(SMALL[name]())
    assert first[-1] < first[0]
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_another_seed_is_another_network(name):
    assert losses_of(SMALL[name](), 1) != losses_of(SMALL[name](seed=7), 1)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_everything_is_placed_where_it_is_told(name):
    built = SMALL[name](device="/device:CPU:1")
    config = v1.ConfigProto(device_count={"CPU": 2})
    options = v1.RunOptions(output_partition_graphs=True)
    metadata = v1.RunMetadata()
    with v1.Session(graph=built.graph, config=config) as session:
        session.run(built.init_op)
        feeds = built.feed_dict()
        session.run([built.loss, built.train_op], feeds, options=options, run_metadata=metadata)
    elsewhere = [
        node.op
        for partition in metadata.partition_graphs
        for node in partition.node
        if not node.device.endswith("CPU:1")
    ]
    # Only what hands over feeds and fetches stays on the host; it may wait by an empty constant.
    assert set(elsewhere) <= {"_Arg", "_Retval", "_Send", "_Recv", "NoOp", "Const"}


@pytest.mark.parametrize("name", sorted(SMALL))
def test_activations_are_read_by_the_backward_phase(name):
    built = SMALL[name]()
    assert built.activations
    before_loss = ancestors([built.loss.op])
    for value in built.activations:
        assert value.op in before_loss
        late = [op for op in value.consumers() if op not in before_loss]
        assert late, value.name


def ancestors(ops):
    seen, waiting = set(ops), list(ops)
    while waiting:
        for tensor in waiting.pop().inputs:
            if tensor.op not in seen:
                seen.add(tensor.op)
                waiting.append(tensor.op)
    return seen


def test_the_unet_has_the_layers_of_its_paper():
    built = graphs.unet3d(16, 8, levels=4)
    kernels = [
        tuple(v.shape)
        for v in built.graph.get_collection("trainable_variables")
        if v.shape.rank == 5
    ]
    down = [(1, 8), (8, 16), (16, 16), (16, 32), (32, 32), (32, 64), (64, 64), (64, 128)]
    assert [shape[3:] for shape in kernels[:8]] == down
    assert [shape[:3] for shape in kernels].count((3, 3, 3)) == 8 + 6
    assert [shape[:3] for shape in kernels].count((2, 2, 2)) == 3
    assert built.outputs.shape.as_list() == [1, 16, 16, 16, 3]


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (graphs.resnet18, 11_689_512),
        (graphs.resnet50, 25_557_032),
        (graphs.densenet121, 7_978_856),
        # The convolutions of the paper's configuration D, and one dense layer of 1000 labels.
        (graphs.vgg16, 14_714_688 + 513_000),
    ],
)
def test_networks_have_the_parameters_of_their_papers(build, count):
    """As in the released models: convolutions before a normalization have no bias."""
    trainable = build(32, 1).graph.get_collection("trainable_variables")
    assert sum(int(np.prod(v.shape)) for v in trainable) == count


def test_a_deep_resnet_has_the_layers_that_it_is_named_by():
    built = graphs.deep_resnet(29, 8, 1, filters=2)
    convolutions = [
        v for v in built.graph.get_collection("trainable_variables") if v.shape.rank == 4
    ]
    projections = [v for v in convolutions if "project" in v.name]
    assert len(convolutions) - len(projections) + 1 == 29 and len(projections) == 3
    with pytest.raises(ConfigError, match="9 n"):
        graphs.deep_resnet(30)


def test_moving_statistics_advance_with_the_train_op():
    built = SMALL["resnet50"]()
    with v1.Session(graph=built.graph) as session:
        session.run(built.init_op)
        moving = [v for v in built.graph.get_collection("variables") if "moving_mean" in v.name]
        before = session.run(moving)
        session.run(built.train_op, built.feed_dict())
        after = session.run(moving)
    assert len(moving) == 9
    for old, new in zip(before, after, strict=True):
        assert not np.array_equal(old, new)


def test_batch_normalization_can_be_added_to_the_unet():
    built = SMALL["unet3d"](normalize=True)
    types = [op.type for op in built.graph.get_operations()]
    assert types.count("FusedBatchNormV3") == 10
    first, *_, last = losses_of(built)
    assert last < first


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_each_optimizer_trains(optimizer):
    first, *_, last = losses_of(SMALL["unet3d"](optimizer_name=optimizer))
    assert last < first


def test_feeds_may_depend_on_the_step():
    images = np.random.RandomState(0).randn(3, 1, 8, 8, 8, 1).astype("f")
    labels = np.zeros([1, 8, 8, 8], "i")
    built = SMALL["unet3d"](images=lambda step: images[step], labels=labels)
    for step in range(3):
        fed = list(built.feed_dict(step).values())
        np.testing.assert_array_equal(fed[0], images[step])
        np.testing.assert_array_equal(fed[1], labels)


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match="multiple of 8"):
        graphs.unet3d(20, levels=4)
    with pytest.raises(ConfigError, match="images and labels"):
        graphs.unet3d(8, levels=2, images=np.zeros([1, 8, 8, 8, 1], "f"))
    with pytest.raises(ConfigError, match="images and labels"):
        graphs.resnet50(8, 1, labels=np.zeros([1], "i"))
    with pytest.raises(ConfigError, match="'lamb'"):
        graphs.unet3d(8, levels=2, optimizer_name="lamb")
