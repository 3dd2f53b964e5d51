"""An emulated accelerator for machines without one: device EMU:0 with a memory of its own.

Load it before TensorFlow makes its devices, that is before the first session or eager operation::

    from tflms import emulator

    emulator.load("400MB")
    with tf.device(emulator.device): ...
    print(emulator.stats().peak_bytes)

It runs the CPU's kernels, but allocates from a region of fixed size with TensorFlow's own BFC
allocator, and moves bytes to and from the host over a link of settable rate: out-of-memory errors,
peaks and fragmentation are real. ``docs/explanation/emulator.md`` tells what is emulated and what
is not.
"""

from __future__ import annotations

from tflms.emulator.accelerator import (
    Statistics,
    device,
    is_loaded,
    load,
    reset_stats,
    set_link,
    stats,
)
from tflms.emulator.link import PRESETS, Link, Preset

__all__ = [
    "PRESETS",
    "Link",
    "Preset",
    "Statistics",
    "device",
    "is_loaded",
    "load",
    "reset_stats",
    "set_link",
    "stats",
]
