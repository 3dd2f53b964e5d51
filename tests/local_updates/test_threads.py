from __future__ import annotations

import functools
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.local_updates.local_nets import compiled, data, digest, losses, mlp
from tflms.errors import ConfigError
from tflms.local_updates import ChunkError, LocalCheckpoint, LocalTrainer, split
from tflms.local_updates.channels import Channel
from tflms.local_updates.worker import Worker

X, Y = data()


def run(*, method="chunked", runtime="fused", queue_size=2, chunks=3, **options):
    model = mlp(depth=2)
    plan = split(model, chunks=chunks)
    trainer = compiled(
        LocalTrainer(model, plan, method=method, runtime=runtime, queue_size=queue_size, timeout=20)
    )
    keras.utils.set_random_seed(2)
    history = trainer.fit(X, Y, epochs=2, batch_size=32, verbose=0, **options)
    return digest(trainer), history.history, trainer


@functools.cache
def fused(method, *, validated=False):
    return run(method=method, **VALIDATED if validated else {})[:2]


VALIDATED = {"validation_data": (X, Y)}


def test_threads_train_as_the_fused_graph_does_bit_for_bit():
    for queue_size in (1, 2, 8):
        found = run(runtime="threads", queue_size=queue_size, **VALIDATED)
        assert found[:2] == fused("chunked", validated=True)
    assert "val_loss" in found[1]


@pytest.mark.parametrize("method", ["overlapping", "backprop", "last"])
def test_the_other_methods_agree_too(method):
    assert run(method=method, runtime="threads", queue_size=1)[:2] == fused(method)


def test_callbacks_set_the_learning_rate_of_every_chunk_at_the_same_batch():
    def callbacks():
        return [keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (epoch + 1))]

    expected = run(callbacks=callbacks())[0]
    assert run(runtime="threads", callbacks=callbacks())[0] == expected
    assert fused("chunked")[0] != expected


def test_early_stopping_ends_all_chunks():
    stop = keras.callbacks.EarlyStopping(monitor="loss_0", mode="min", min_delta=1e9, patience=0)
    _, history, trainer = run(runtime="threads", callbacks=[stop])
    assert len(history["loss"]) <= 2
    assert trainer._runtime._threads == []


class Sleep(keras.layers.Layer):
    """Stands for a device that takes its time: no core is needed to wait."""

    def __init__(self, seconds, **options):
        super().__init__(**options)
        self.seconds = seconds

    def call(self, x, training=False):
        if not training:
            return x

        def wait(value):
            time.sleep(self.seconds)
            return value

        slept = tf.numpy_function(wait, [tf.stop_gradient(x)], x.dtype, stateful=True)
        slept.set_shape(x.shape)
        return x + tf.stop_gradient(slept - x)

    def compute_output_shape(self, shape):
        return shape


def sleeping(stages, seconds):
    keras.utils.set_random_seed(0)
    entry = tensor = keras.Input((4,))
    for index in range(stages):
        tensor = keras.layers.Dense(4, name=f"work_{index}")(tensor)
        tensor = Sleep(seconds, name=f"sleep_{index}")(tensor)
    return keras.Model(entry, tensor)


def test_sleeping_stages_run_at_the_same_time_within_a_tenth_of_the_ideal(monkeypatch):
    # Each chunk's device time is a sleep, which needs no core; the rest is what the queues cost.
    seconds, batches, stages = 0.1, 14, 4
    ideal = (batches + stages - 1) * seconds
    plain = Worker._train_on

    def slow(self, message):
        time.sleep(seconds)
        plain(self, message)

    monkeypatch.setattr(Worker, "_train_on", slow)
    model = mlp(depth=stages - 1, width=8, dropout=0, norm=False)
    trainer = LocalTrainer(model, split(model, chunks=stages), runtime="threads", timeout=30)
    trainer.compile(optimizer=keras.optimizers.SGD(0.0), loss=losses())
    times = []

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.start = time.monotonic()

        def on_epoch_end(self, epoch, logs=None):
            times.append(time.monotonic() - self.start)
            # The first epoch traces; others may lose a core to other programs for a while.
            self.model.stop_training = epoch > 0 and times[-1] < 1.10 * ideal

    x, y = X[:batches], Y[:batches]
    trainer.fit(x, y, batch_size=1, epochs=8, verbose=0, callbacks=[Clock()])
    assert min(times[1:]) < 1.10 * ideal
    assert min(times[1:]) > 0.99 * ideal


def test_a_queue_never_holds_more_than_its_size_and_keeps_the_order():
    channel = Channel(2, [tf.int32])
    channel.put_token({"kind": "a"})
    channel.put_token({"kind": "b"})
    assert channel.size() == 2
    third = threading.Thread(target=lambda: channel.put_token({"kind": "c"}))
    third.start()
    third.join(0.3)
    assert third.is_alive()  # the producer is held back
    assert [channel.take().facts["kind"] for _ in range(3)] == ["a", "b", "c"]
    third.join(5)
    assert not third.is_alive()


def test_an_exception_in_a_chunk_ends_the_run_and_names_chunk_and_batch():
    class Trap(keras.layers.Layer):
        def call(self, x):
            tf.debugging.assert_less(tf.reduce_max(tf.abs(x)), 1e6, message="trap sprung")
            return x

        def compute_output_shape(self, shape):
            return shape

    keras.utils.set_random_seed(0)
    entry = keras.Input((16,))
    tensor = keras.layers.Dense(8, name="first")(entry)
    tensor = keras.layers.Dense(5, name="second")(Trap()(tensor))
    model = keras.Model(entry, tensor)
    trainer = LocalTrainer(model, split(model, at=["first"]), runtime="threads", timeout=20)
    trainer.compile(optimizer=keras.optimizers.SGD(1e-6), loss=losses())
    x = X.copy()
    x[70] = 1e9  # the third batch
    started = time.monotonic()
    with pytest.raises(ChunkError, match=r"chunk 1 stopped at batch 2.*trap sprung") as caught:
        trainer.fit(x, Y, batch_size=32, shuffle=False, verbose=0)
    assert (caught.value.chunk, caught.value.batch) == (1, 2)
    assert time.monotonic() - started < 20
    history = trainer.fit(X, Y, batch_size=32, verbose=0)  # and it can start anew
    assert np.isfinite(history.history["loss"][0])


def test_a_chunk_that_hangs_ends_the_run_within_its_timeout():
    model = sleeping(2, 3.0)
    trainer = LocalTrainer(
        model, split(model, at=["sleep_0"]), runtime="threads", timeout=1.0, heads="pool_linear"
    )
    trainer.compile(optimizer="sgd", loss="mse")
    x = np.zeros((8, 4), "float32")
    with pytest.raises(ChunkError, match="no progress for 1 s"):
        trainer.fit(x, x, batch_size=1, verbose=0)


def test_a_loss_that_is_no_number_names_its_chunk_in_threads():
    weights = np.ones(len(X), "float32")
    weights[40] = np.nan
    model = mlp(norm=False, dropout=0)
    trainer = compiled(LocalTrainer(model, split(model, chunks=2), runtime="threads", timeout=20))
    with pytest.raises(ChunkError, match=r"chunk 0 stopped at batch 1.*no number"):
        trainer.fit(X, Y, sample_weight=weights, batch_size=32, shuffle=False, verbose=0)


class Reader(keras.callbacks.Callback):
    """Evaluates and predicts in the middle of an epoch, once chunks may run behind."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            loss = self.model.evaluate(X, Y, verbose=0, return_dict=True)["loss"]
            self.seen.append([loss, self.model.predict(X[:8], verbose=0).tolist()])


def test_reading_in_the_middle_of_an_epoch_meets_all_chunks_at_one_batch(monkeypatch):
    plain = Worker._train_on

    def slow(self, message):
        if self.stage.index:
            time.sleep(0.05)
        plain(self, message)

    monkeypatch.setattr(Worker, "_train_on", slow)
    seen, digests = [], []
    for runtime in ("fused", "threads"):
        model = mlp()
        plan = split(model, chunks=2)
        trainer = compiled(LocalTrainer(model, plan, runtime=runtime, queue_size=8, timeout=20))
        keras.utils.set_random_seed(2)
        reader = Reader()
        trainer.fit(X, Y, batch_size=16, verbose=0, callbacks=[reader])
        seen.append(reader.seen)
        digests.append(digest(trainer))
    assert seen[0] == seen[1] and len(seen[0]) == 1
    assert digests[0] == digests[1]


@pytest.mark.parametrize("runtime", ["fused", "threads"])
def test_labels_that_are_missing_or_several_are_refused(runtime):
    model = mlp()
    trainer = compiled(LocalTrainer(model, split(model, chunks=2), runtime=runtime))
    with pytest.raises(ConfigError, match="give fit\\(\\) y"):
        trainer.fit(X, verbose=0)
    with pytest.raises(ConfigError, match="structure of 2 tensors"):
        trainer.fit(X, {"a": Y, "b": Y}, verbose=0)


def test_one_batch_alone_belongs_to_the_fused_runtime():
    model = mlp()
    plan = split(model, chunks=2)
    fused = compiled(LocalTrainer(model, plan))
    assert {"loss", "loss_0"} <= set(fused.train_on_batch(X, Y, return_dict=True))
    with pytest.raises(ConfigError, match="use fit"):
        compiled(LocalTrainer(model, plan, runtime="threads")).train_on_batch(X, Y)


def test_a_failing_callback_leaves_no_thread_behind():
    class Bad(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("callback broke")

    model = mlp()
    trainer = compiled(LocalTrainer(model, split(model, chunks=2), runtime="threads", timeout=20))
    with pytest.raises(RuntimeError, match="callback broke"):
        trainer.fit(X, Y, verbose=0, callbacks=[Bad()])
    assert trainer._runtime._threads == []


@pytest.mark.parametrize("runtime", ["fused", "threads"])
def test_a_run_resumed_within_an_epoch_equals_an_uninterrupted_one(tmp_path, runtime):
    def trainer():
        model = mlp()
        keras.utils.set_random_seed(2)
        options = {"runtime": runtime, "timeout": 20}
        return compiled(LocalTrainer(model, split(model, chunks=2), **options))

    options = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    whole = trainer()
    saver = LocalCheckpoint(tmp_path, every_batches=8)  # batch 8 is the second of epoch 1
    history = whole.fit(X, Y, callbacks=[saver], **options).history
    fresh = trainer()
    resumed = fresh.fit(X, Y, resume=tmp_path / "batch_8", **options).history
    assert digest(fresh) == digest(whole)
    assert {k: v[-1] for k, v in resumed.items()} == {k: v[-1] for k, v in history.items()}
