"""Trains two Keras models by ``fit`` in a memory in which plain ``fit`` fails, with equal numbers.

ResNet-50 on slices of a brain (112 x 112, 32 at a time) and a 3D U-Net on the whole brain (96 x 96
x 96) run on the emulated accelerator: plain in a large memory, plain in a small one (which ends
with ResourceExhausted), and with one callback added in the same small one.

Every loss and all final weights are compared bit by bit in runs of one operation at a time: else a
plain ResNet-50 does not equal itself (probably because sums of three gradients or more are added in
an order that depends on timing).

    python examples/keras_fit.py [resnet50] [unet3d] [--steps 3]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from typing import Any

LARGE_BYTES = 4_000_000_000
# The small memory, as a share of the plain peak: fragmentation needs room above the rewritten peak.
SMALL_SHARE = 0.6
BATCH = {"resnet50": 32, "unet3d": 1}
CONFIG: dict[str, dict[str, Any]] = {
    "resnet50": {"batch_size": 32, "strategy": "direct_order"},
    "unet3d": {"batch_size": 1},
}


def build(name: str) -> tuple[Any, Any, Any]:
    """Return a compiled model and real images with labels to train it on."""
    import keras

    from tflms.zoo import data, models

    if name == "resnet50":
        inputs, labels = data.slices(112, count=2 * BATCH[name])
        model = models.resnet50(112, classes=12)
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    else:
        image, tissue = data.brain(96)
        inputs, labels = image[None], tissue[None]
        model = models.unet3d(96, 8)
        optimizer = keras.optimizers.Adam(1e-3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
    return model, inputs, labels


def train(name: str, memory_bytes: int, settings: Any, steps: int, in_turn: bool) -> dict[str, Any]:
    """Train in this process and return losses, a digest of the weights and the peak.

    ``settings`` is the config of the callback; None trains without it. ``in_turn`` runs one
    operation at a time.
    """
    import keras
    import tensorflow as tf

    import tflms
    from tflms import emulator

    if in_turn:
        tf.config.threading.set_inter_op_parallelism_threads(1)
    else:  # on few cores, kernels that take them all keep parked values from leaving in time
        tf.config.threading.set_intra_op_parallelism_threads(1)
    emulator.load(memory_bytes)
    tf.config.experimental.enable_op_determinism()
    model, inputs, labels = build(name)
    losses: list[float] = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(float(logs["loss"]))
    )
    support = [] if settings is None else [tflms.keras.LargeModelSupport(settings)]
    count = len(inputs) // BATCH[name]
    emulator.reset_stats()
    try:
        model.fit(
            inputs, labels, batch_size=BATCH[name], epochs=-(-steps // count), shuffle=False,
            verbose=0, callbacks=[record, *support],
        )  # fmt: skip
    except tf.errors.ResourceExhaustedError:
        return {"failed": "ResourceExhausted"}
    digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
    result: dict[str, Any] = {
        "losses": [loss.hex() for loss in losses],
        "weights": digest,
        "peak_bytes": emulator.stats().peak_bytes,
    }
    for callback in support:
        print(callback.report, file=sys.stderr)
    return result


def in_new_process(
    name: str, memory_bytes: int, settings: Any, steps: int, *, in_turn: bool = False
) -> dict[str, Any]:
    """Train in a process of its own: a device gets its memory once."""
    job = json.dumps([name, memory_bytes, settings, steps, in_turn])
    done = subprocess.run(
        [sys.executable, __file__, "--job", job],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ},
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def compare(name: str, settings: dict[str, Any], steps: int) -> bool:
    """Run a model all ways, print what came of it, and tell whether all is as promised."""
    print(f"{name}; all figures measured on the emulated accelerator")
    plain, again, ours = (
        in_new_process(name, LARGE_BYTES, config, steps, in_turn=True)
        for config in (None, None, settings)
    )
    repeats, equal = (
        all(plain[key] == run[key] for key in ("losses", "weights")) for run in (again, ours)
    )
    print(f"  {len(plain['losses'])} steps, one operation at a time:")
    print(f"    the plain run equals itself, bit by bit: {repeats}")
    print(f"    losses and weights with the callback equal the plain ones, bit by bit: {equal}")
    peak = in_new_process(name, LARGE_BYTES, None, steps)["peak_bytes"]
    small = int(peak * SMALL_SHARE)
    fails = in_new_process(name, small, None, steps)
    trains = in_new_process(name, small, settings, steps)
    print(f"  plain fit, large memory: peak {peak / 1e6:.1f} MB")
    print(f"  plain fit, {small / 1e6:.1f} MB: {fails.get('failed', 'trained')}")
    if "failed" in trains:
        print(f"  with the callback, {small / 1e6:.1f} MB: {trains['failed']}")
        return False
    print(
        f"  with the callback, {small / 1e6:.1f} MB: trained, peak "
        f"{trains['peak_bytes'] / 1e6:.1f} MB, {trains['peak_bytes'] / peak:.1%} of plain"
    )
    return repeats and equal and "failed" in fails


def main() -> int:
    parser = argparse.ArgumentParser(description="fit() trains what did not fit.")
    parser.add_argument("models", nargs="*", help="resnet50, unet3d (default: both)")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--config", default="{}", help="more settings, as JSON")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        print(json.dumps(train(*json.loads(arguments.job))))
        return 0
    settings = json.loads(arguments.config)
    names = arguments.models or list(BATCH)
    if unknown := [name for name in names if name not in BATCH]:
        parser.error(f"no model {unknown[0]!r}; there are: {', '.join(BATCH)}")
    results = [compare(name, {**CONFIG[name], **settings}, arguments.steps) for name in names]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
