from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(device, batch, *cases):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "tflms.commands.local_memory", device, str(batch), *cases]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def peaks(process):
    told, complaints = process.communicate(timeout=170)
    assert process.returncode == 0, complaints[-2000:]
    return [int(line) for line in told.splitlines()]


def test_a_process_training_greedily_in_order_holds_three_activations_of_sixteen():
    # Fresh processes, one thread each, 16 tanh layers of 512, batch 16384, 32 MiB an activation.
    # How much more than its activations backprop's process holds is the C library's: both limits
    # are in activations therefore.
    both = [start("cpu", 16384, f"{method},ordered") for method in ("backprop", "greedy")]
    (whole,), (greedy,) = (peaks(process) for process in both)
    assert whole > 16 * 2**25
    assert greedy < 3 * 2**25


def test_the_device_peak_falls_with_the_order_and_once_more_with_swapping():
    # A quarter of that batch on the emulated device, whose allocator counts every byte.
    cases = ("backprop,ordered", "greedy,ordered", "greedy,loose")
    chunks = ("chunked,ordered", "chunked,swapped")
    whole, greedy, loose, two, swapped = peaks(start("emu", 4096, *cases, *chunks))
    assert whole > 16 * 2**23
    assert greedy < 0.15 * whole
    assert loose > 3 * greedy
    assert swapped < 0.7 * two < 0.7 * whole
