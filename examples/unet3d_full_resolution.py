"""Train a 3D U-Net on a whole brain volume that its step's activations do not fit in memory for.

    python examples/unet3d_full_resolution.py               # 192x192x192 voxels, minutes
    python examples/unet3d_full_resolution.py --size 64     # seconds

The network (8 filters, four levels) labels each voxel as background, grey or white matter, on the
emulated accelerator. First the plain graph is tried, which ends in the device's out-of-memory
error; then the same graph is rewritten and trained, and one slice is drawn: image, labels,
prediction.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import tflms
from tflms import emulator
from tflms.units import format_bytes, format_seconds
from tflms.zoo import data, graphs

v1 = tf.compat.v1
CONFIG = {"strategy": "chain_rule", "swap_branches": True, "branch_threshold": 8}


def main() -> int:
    args = arguments()
    console = Console()
    # The plain step needs about 150 MB at 64x64x64 voxels and 3.9 GB at 192x192x192.
    memory = args.memory or (f"{420 * args.size**3 + 2**22}")
    emulator.load(memory)
    v1.disable_eager_execution()
    tf.config.experimental.enable_op_determinism()
    limit = emulator.stats().limit_bytes
    image, labels = data.brain(args.size)
    console.print(
        f"{args.size}x{args.size}x{args.size} voxels, device memory {format_bytes(limit)}"
    )

    if not args.skip_plain:
        network, _ = build(image, labels, args)
        try:
            train(network, 1, console)
        except tf.errors.ResourceExhaustedError as error:
            told = [line for line in error.message.splitlines() if "OOM" in line]
            console.print(f"plain: {told[0].strip()}", style="red")
        else:
            console.print("plain: it fits; give it less --memory", style="red")
            return 1

    network, predicted = build(image, labels, args)
    report = tflms.rewrite(
        network.graph, CONFIG, loss=network.loss, fetches=[network.train_op, network.loss]
    )
    console.print(report)
    losses, prediction = train(network, args.steps, console, predicted)
    draw(args.picture, image[..., 0], labels, prediction)
    right = float(np.mean(prediction == labels[:, :, args.size // 2]))
    console.print(f"{right:.1%} of the slice's voxels are right; drawn to {args.picture}")
    falls = losses[-1] < losses[0]
    console.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}", style="green" if falls else "red")
    return 0 if falls else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, default=192, help="voxels per edge, a multiple of 8")
    parser.add_argument("--filters", type=int, default=8, help="channels of the first convolution")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--memory", help="of the emulated device, such as 3GB; default by the size")
    parser.add_argument("--skip-plain", action="store_true", help="do not try the plain graph")
    parser.add_argument("--picture", type=Path, default=Path("unet3d.png"))
    return parser.parse_args()


def build(image: Any, labels: Any, args: argparse.Namespace) -> tuple[graphs.TrainingGraph, Any]:
    """Return the training graph and what it predicts for the middle axial slice."""
    network = graphs.unet3d(
        args.size,
        args.filters,
        images=image[None],
        labels=labels[None],
        optimizer_name="adam",
        learning_rate=args.learning_rate,
        device=emulator.device,
    )
    with network.graph.as_default(), tf.device(emulator.device):
        predicted = tf.argmax(network.outputs[0, :, :, args.size // 2], axis=-1)
    return network, predicted


def train(
    network: graphs.TrainingGraph, steps: int, console: Console, predicted: Any = None
) -> tuple[list[float], Any]:
    """Train, say how each step went, and return the losses and a prediction."""
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    losses = []
    with v1.Session(graph=network.graph) as session:
        session.run(network.init_op)
        with Progress(*columns, console=console, transient=True) as progress:
            for step in progress.track(range(steps)):
                emulator.reset_stats()
                start = time.perf_counter()
                loss, _ = session.run([network.loss, network.train_op], network.feed_dict(step))
                seconds, used = time.perf_counter() - start, emulator.stats()
                losses.append(float(loss))
                console.print(
                    f"step {step}  loss {loss:.4f}  peak {format_bytes(used.peak_bytes)}  "
                    f"to host {format_bytes(used.to_host_bytes)}  {format_seconds(seconds)}"
                )
        prediction = None if predicted is None else session.run(predicted, network.feed_dict(steps))
    return losses, prediction


def draw(path: Path, image: Any, labels: Any, prediction: Any) -> None:
    """Write the middle axial slice as a picture: image, labels, prediction."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    middle = image.shape[2] // 2
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4.4), layout="constrained")
    panels = (("input", image[:, :, middle], "gray"), ("labels", labels[:, :, middle], "viridis"),
              ("prediction", prediction, "viridis"))  # fmt: skip
    for axis, (title, values, colours) in zip(axes, panels, strict=True):
        largest = None if title == "input" else len(data.TISSUES) - 1
        axis.imshow(np.rot90(values), cmap=colours, vmin=None if largest is None else 0,
                    vmax=largest, interpolation="nearest")  # fmt: skip
        axis.set_title(title)
        axis.axis("off")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
