"""What optimizers make of gradients on the device rounds as before in a fixed order."""

from tests.support.emulated import run_on_emulator

SCRIPT = """
import keras
from keras import layers
import tflms
tf.config.experimental.enable_op_determinism()

def build():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((24, 24, 3))
    h = layers.Conv2D(16, 3, padding="same")(inputs)
    for _ in range(4):
        y = layers.Activation("relu")(layers.BatchNormalization()(h))
        h = layers.Add()([h, layers.Conv2D(16, 3, padding="same")(y)])
    model = keras.Model(inputs, layers.Dense(5)(layers.GlobalAveragePooling2D()(h)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, global_clipnorm=0.3), loss, jit_compile=False)
    return model

def train(callbacks):
    random = np.random.RandomState(0)
    images = random.standard_normal((96, 24, 24, 3)).astype("f")
    with tf.device(emulator.device):
        model = build()
        model.fit(images, random.randint(0, 5, 96), batch_size=32, epochs=2, verbose=0,
                  shuffle=False, callbacks=callbacks)
        return [w.tobytes().hex() for w in model.get_weights()]

callback = tflms.keras.LargeModelSupport({"memory_limit": 0.98, "batch_size": 32})
result = [train([]) == train([callback]), len(callback.report.orders)]
"""


def test_a_clipped_global_norm_gives_the_same_weights_in_a_fixed_order():
    same, orders = run_on_emulator(SCRIPT)
    assert same
    assert orders
