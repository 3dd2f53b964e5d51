"""Trains a very deep ResNet in a memory in which plain ``fit`` fails, by computing again.

    python examples/deep_resnet.py                       # 164 layers
    python examples/deep_resnet.py --depth 1001 --image 16 --filters 4 --batch 8   # long
    python examples/deep_resnet.py --strategy best_periodic

The network (He et al. 2016, "Identity mappings"; 16 images of 32 x 32 at a time) trains three
times on the emulated accelerator: plain in a large memory, plain in a small one (which ends with
ResourceExhausted), and in the same small one with a callback that recomputes. Nothing is copied to
the host. Losses and final weights, moving statistics among them, are equal bit by bit. One
operation runs at a time: else a plain run does not always equal itself, as TensorFlow adds three
gradients or more in an order that depends on which of them nobody else holds at that moment.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from typing import Any

LARGE_BYTES = 12_000_000_000
# Of the small memory: holes between buffers need room as well.
LIMIT_SHARE = 0.92


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train in this process; return losses, a digest of the weights, peak and seconds a step."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tflms
    from tflms import emulator
    from tflms.zoo import models

    tf.config.threading.set_inter_op_parallelism_threads(1)
    emulator.load(job["memory_bytes"])
    tf.config.experimental.enable_op_determinism()
    model = models.deep_resnet(job["depth"], image=job["image"], filters=job["filters"])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, jit_compile=False)
    random = np.random.RandomState(0)
    images = random.standard_normal([job["batch"], job["image"], job["image"], 3]).astype("float32")
    labels = random.randint(0, 10, [job["batch"]])
    support = [tflms.keras.LargeModelSupport(job["config"])] if job["config"] else []
    losses: list[float] = []
    seconds: list[float] = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: seconds.append(-time.perf_counter()),
        on_train_batch_end=lambda batch, logs: (
            losses.append(float(logs["loss"])),
            seconds.append(seconds.pop() + time.perf_counter()),
        ),
    )
    emulator.reset_stats()
    try:
        model.fit(
            images, labels, batch_size=job["batch"], epochs=job["steps"], shuffle=False, verbose=0,
            callbacks=[record, *support],
        )  # fmt: skip
    except tf.errors.ResourceExhaustedError:
        return {"failed": "ResourceExhausted"}
    for callback in support:
        print(callback.report, file=sys.stderr)
    return {
        "losses": losses,
        "weights": hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest(),
        "peak_bytes": emulator.stats().peak_bytes,
        "to_host_bytes": emulator.stats().to_host_bytes,
        "seconds": min(seconds[1:]),
        "recomputed": sum(len(callback.report.recomputes) for callback in support),
    }


def in_new_process(**job: Any) -> dict[str, Any]:
    """Train in a process of its own: a device gets its memory once."""
    done = subprocess.run(
        [sys.executable, __file__, "--job", json.dumps(job)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ},
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--depth", type=int, default=164, help="layers: 9 n + 2")
    parser.add_argument("--image", type=int, default=32, help="edge in pixels")
    parser.add_argument("--filters", type=int, default=16, help="16 in the paper")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.5, help="small memory over the plain peak")
    parser.add_argument("--strategy", default="optimal_checkpointing")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(json.dumps(train(json.loads(args.job))))
        return 0
    shape = {"depth": args.depth, "image": args.image, "filters": args.filters}
    job = {**shape, "batch": args.batch, "steps": max(2, args.steps), "config": None}
    print(f"ResNet-{args.depth}, {args.batch} images; measured on the emulated accelerator")
    plain = in_new_process(memory_bytes=LARGE_BYTES, **job)
    told = ", ".join(f"{loss:.6f}" for loss in plain["losses"])
    print(f"  plain, large memory: peak {plain['peak_bytes'] / 1e6:.1f} MB, "
          f"{plain['seconds']:.2f} s a step, losses {told}")  # fmt: skip
    small = int(plain["peak_bytes"] * args.share)
    fails = in_new_process(memory_bytes=small, **job)
    print(f"  plain, {small / 1e6:.1f} MB: {fails.get('failed', 'trained')}")
    job["config"] = {
        "strategy": args.strategy,
        "memory_limit": int(small * LIMIT_SHARE),
        "batch_size": args.batch,
    }
    ours = in_new_process(memory_bytes=small, **job)
    if "failed" in ours:
        print(f"  {args.strategy}, {small / 1e6:.1f} MB: {ours['failed']}")
        return 1
    equal = all(plain[key] == ours[key] for key in ("losses", "weights"))
    print(f"  {args.strategy}, {small / 1e6:.1f} MB: trained, "
          f"peak {ours['peak_bytes'] / 1e6:.1f} MB, {ours['seconds']:.2f} s a step, "
          f"{ours['recomputed']} operations run again")  # fmt: skip
    print(f"  losses and weights equal the plain ones, bit by bit: {equal}")
    return 0 if equal and "failed" in fails else 1


if __name__ == "__main__":
    sys.exit(main())
