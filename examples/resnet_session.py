"""Train ResNet-50 in a session loop, with the settings of the rewrite on the command line.

    python examples/resnet_session.py --memory 500MB
    python examples/resnet_session.py --memory 500MB --strategy direct_order --lb 3 --n-tensors 40
    python examples/resnet_session.py --memory 500MB --strategy none      # runs out of memory

It runs on the emulated accelerator; with ``--on /gpu:0`` on a real one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

import tflms
from tflms import emulator
from tflms.commands.options import add_config_options, config_of
from tflms.units import format_bytes, format_seconds
from tflms.zoo import data, graphs

v1 = tf.compat.v1


def main() -> int:
    args = arguments()
    config = config_of(args)
    emulated = args.on is None
    if emulated:
        emulator.load(args.memory)
    v1.disable_eager_execution()
    tf.config.experimental.enable_op_determinism()

    # Slices of the brain volume in 12 classes: which plane, and how deep.
    images, labels = data.slices(args.image, count=args.batch)
    network = graphs.resnet50(
        args.image,
        args.batch,
        classes=12,
        images=images,
        labels=labels,
        learning_rate=args.learning_rate,
        device=args.on or emulator.device,
    )
    report = tflms.rewrite(
        network.graph, config, loss=network.loss, fetches=[network.train_op, network.loss]
    )
    print(report)
    if report.changed:
        alive = report.verify()
        print(f"{alive.survived} of {alive.expected} inserted operations are alive")

    try:
        train(network, args.steps, emulated=emulated)
    except tf.errors.ResourceExhaustedError as error:
        told = [line.strip() for line in error.message.splitlines() if "OOM" in line]
        print(f"out of memory: {told[0] if told else error.message}")
        return 1
    return 0


def train(network: graphs.TrainingGraph, steps: int, *, emulated: bool) -> None:
    """Train, and print loss, time, peak and traffic of each step."""
    with v1.Session(graph=network.graph) as session:
        session.run(network.init_op)
        for step in range(steps):
            if emulated:
                emulator.reset_stats()
            start = time.perf_counter()
            loss, _ = session.run([network.loss, network.train_op], network.feed_dict(step))
            line = f"step {step}  loss {loss:.6f}  {format_seconds(time.perf_counter() - start)}"
            if emulated:
                used = emulator.stats()
                line += f"  peak {format_bytes(used.peak_bytes)}"
                line += f"  to host {format_bytes(used.to_host_bytes)}"
                line += f"  to device {format_bytes(used.to_device_bytes)}"
            print(line, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--image", type=int, default=112, help="edge of the images in pixels")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=0.001)
    parser.add_argument("--memory", default="1GB", help="of the emulated device")
    parser.add_argument("--on", metavar="DEVICE", help="a real device, such as /gpu:0, instead")
    add_config_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
