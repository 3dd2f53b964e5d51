"""fit on a device of its own: in a memory where plain fit fails, and over two CPU devices."""

from __future__ import annotations

import pytest

from tests.support.emulated import run_on_emulator

TRAIN = """
import keras
import tflms

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.experimental.enable_op_determinism()
keras.utils.set_random_seed(3)
L = keras.layers
inputs = keras.Input([64, 64, 3])
x = inputs
for _ in range(8):
    x = L.ReLU()(L.Conv2D(16, 3, padding="same")(x))
model = keras.Model(inputs, L.Dense(1)(L.GlobalAveragePooling2D()(x)))
model.compile("adam", "mse", jit_compile=False)
random = np.random.RandomState(0)
images = random.standard_normal([16, 64, 64, 3]).astype("float32")
labels = random.standard_normal([16, 1]).astype("float32")
callback = tflms.keras.LargeModelSupport({"batch_size": 8})
result = {}
emulator.reset_stats()
try:
    history = model.fit(images, labels, batch_size=8, epochs=2, shuffle=False, verbose=0,
                        callbacks=[callback] if rewritten else [])
    result["losses"] = [loss.hex() for loss in history.history["loss"]]
    result["weights"] = [w.tobytes().hex() for w in model.get_weights()]
    result["swaps"] = len(callback.report.swaps)
    result["alive"] = rewritten and callback.report.survival.ok
    result["moved_bytes"] = emulator.stats().to_host_bytes
except tf.errors.ResourceExhaustedError:
    result["failed"] = True
result["peak_bytes"] = emulator.stats().peak_bytes
"""


def train(memory_bytes, *, rewritten):
    return run_on_emulator(TRAIN, memory_bytes=memory_bytes, rewritten=rewritten)


@pytest.fixture(scope="module")
def plain():
    return train(400_000_000, rewritten=False)


def test_fit_trains_in_a_memory_where_plain_fit_fails_with_the_same_numbers(plain):
    small = int(0.6 * plain["peak_bytes"])
    assert train(small, rewritten=False).get("failed")
    ours = train(small, rewritten=True)
    assert "failed" not in ours
    assert ours["losses"] == plain["losses"]
    assert ours["weights"] == plain["weights"]
    assert ours["alive"] and ours["swaps"] >= 5
    # Four steps, and in each of them at least five activations of two megabytes.
    assert ours["moved_bytes"] - plain["moved_bytes"] >= 4 * 5 * 2_000_000


def test_a_function_over_two_logical_cpu_devices_gives_the_same():
    result = run_on_emulator(
        """
        import tflms
        from tests.function.steps import EVERYTHING, Net, batch, train

        cpu = tf.config.list_physical_devices("CPU")[0]
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, two)
        tf.config.experimental.enable_op_determinism()
        config = {**EVERYTHING, "device": "/cpu:1"}
        with tf.device("/cpu:1"):
            batches = [batch(seed=i) for i in range(3)]
            plain, net = Net(), Net()
            step = tflms.function(net.step, config)
            same = train(tf.function(plain.step), plain, batches) == train(step, net, batches)
            graph = step.get_concrete_function(batches[0]).graph
        names = [name for name in step.report().inserted_names if "swap" in name]
        result = {
            "same": same,
            "alive": step.report().verify().ok,
            "swaps": len(step.report().swaps),
            "devices": sorted({graph.get_operation_by_name(n).device for n in names}),
        }
        """,
        memory_bytes=None,
    )
    assert result["same"] and result["alive"] and result["swaps"] >= 3
    assert [device.lower() for device in result["devices"]] == ["/cpu:0"]
