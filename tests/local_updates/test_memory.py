from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROBE = Path(__file__).with_name("memory_probe.py")


def peak(method, ordered, device, batch):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(PROBE.parents[2])
    run = subprocess.run(
        [sys.executable, str(PROBE), method, ordered, device, str(batch)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return int(run.stdout.split()[-1])


def test_a_process_training_greedily_in_order_holds_a_fraction_of_the_activations():
    # Fresh processes, 16 tanh layers of 512, batch 16384, 32 MiB an activation.
    whole = peak("backprop", "ordered", "cpu", 16384)
    assert whole > 16 * 2**25
    assert peak("greedy", "ordered", "cpu", 16384) < 0.15 * whole


def test_the_device_peak_falls_with_the_order_between_chunks_and_not_without_it():
    # A quarter of that batch on the emulated device, whose allocator counts every byte.
    whole = peak("backprop", "ordered", "emu", 4096)
    assert whole > 16 * 2**23
    greedy = peak("greedy", "ordered", "emu", 4096)
    assert greedy < 0.15 * whole
    assert peak("greedy", "loose", "emu", 4096) > 3 * greedy
