"""Trains two Keras models by ``fit`` in a memory in which plain ``fit`` fails, with equal numbers.

ResNet-50 on slices of a brain (112 x 112, 32 at a time) and a 3D U-Net on the whole brain (96 x 96
x 96) run on the emulated accelerator: plain in a large memory, plain in a small one (which ends
with ResourceExhausted), and with one callback added in the same small one. Every loss and all final
weights are compared bit by bit.

Operations run one at a time (--threads 1). With as many as TensorFlow likes (--threads 0) the
numbers are equal as well, and ResNet-50 needs 46 instead of 43 percent.

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
SIZE = {"resnet50": 112, "unet3d": 96}
CONFIG: dict[str, dict[str, Any]] = {
    "resnet50": {"batch_size": 32},
    "unet3d": {"batch_size": 1},
}


def build(name: str, size: int) -> tuple[Any, Any, Any]:
    """Return a compiled model and real images with labels to train it on."""
    import keras

    from tflms.zoo import data, models

    if name == "resnet50":
        inputs, labels = data.slices(size, count=2 * BATCH[name])
        model = models.resnet50(size, classes=12)
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    else:
        image, tissue = data.brain(size)
        inputs, labels = image[None], tissue[None]
        model = models.unet3d(size, 8)
        optimizer = keras.optimizers.Adam(1e-3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
    return model, inputs, labels


def train(
    name: str, size: int, memory_bytes: int, settings: Any, steps: int, threads: int
) -> dict[str, Any]:
    """Train in this process and return losses, a digest of the weights and the peak.

    ``settings`` is the config of the callback; None trains without it.
    """
    import keras
    import tensorflow as tf

    import tflms
    from tflms import emulator

    tf.config.threading.set_inter_op_parallelism_threads(threads)
    emulator.load(memory_bytes)
    tf.config.experimental.enable_op_determinism()
    model, inputs, labels = build(name, size)
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
    name: str, size: int, memory_bytes: int, settings: Any, steps: int, threads: int
) -> dict[str, Any]:
    """Train in a process of its own: a device gets its memory once."""
    job = json.dumps([name, size, memory_bytes, settings, steps, threads])
    done = subprocess.run(
        [sys.executable, __file__, "--job", job],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ},
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def compare(name: str, size: int, settings: dict[str, Any], steps: int, threads: int) -> bool:
    """Run a model all ways, print what came of it, and tell whether all is as promised."""
    print(f"{name}; all figures measured on the emulated accelerator")
    plain, again = (in_new_process(name, size, LARGE_BYTES, None, steps, threads) for _ in range(2))
    peak = plain["peak_bytes"]
    small = int(peak * SMALL_SHARE)
    fails = in_new_process(name, size, small, None, steps, threads)
    ours = in_new_process(name, size, small, settings, steps, threads)
    print(f"  plain fit, large memory: {len(plain['losses'])} steps, peak {peak / 1e6:.1f} MB")
    print(f"  plain fit, {small / 1e6:.1f} MB: {fails.get('failed', 'trained')}")
    if "failed" in ours:
        print(f"  with the callback, {small / 1e6:.1f} MB: {ours['failed']}")
        return False
    repeats, equal = (
        all(plain[key] == run[key] for key in ("losses", "weights")) for run in (again, ours)
    )
    print(
        f"  with the callback, {small / 1e6:.1f} MB: trained, peak "
        f"{ours['peak_bytes'] / 1e6:.1f} MB, {ours['peak_bytes'] / peak:.1%} of plain"
    )
    print(f"  the plain run equals itself, bit by bit: {repeats}")
    print(f"  losses and weights with the callback equal the plain ones, bit by bit: {equal}")
    return repeats and equal and "failed" in fails


def main() -> int:
    parser = argparse.ArgumentParser(description="fit() trains what did not fit.")
    parser.add_argument("models", nargs="*", help="resnet50, unet3d (default: both)")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--size", type=int, help="pixels or voxels per edge (default: 112, 96)")
    parser.add_argument("--threads", type=int, default=1, help="operations that run at a time")
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
    results = [
        compare(
            name,
            arguments.size or SIZE[name],
            {**CONFIG[name], **settings},
            arguments.steps,
            arguments.threads,
        )
        for name in names
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
