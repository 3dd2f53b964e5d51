from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = Path(__file__).with_name("memory_probe.py")


def peak(method, ordered):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(PROBE.parents[2])
    run = subprocess.run(
        [sys.executable, str(PROBE), method, ordered],
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
        check=True,
    )
    return int(run.stdout.split()[-1])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's VmHWM")
def test_ordered_greedy_needs_a_fraction_of_the_activations_of_backpropagation():
    # Fresh processes, 16 tanh layers of 512, batch 16384, 32 MiB an activation.
    whole = peak("backprop", "ordered")
    greedy = peak("greedy", "ordered")
    loose = peak("greedy", "loose")
    assert whole > 16 * 2**25
    assert greedy < 0.15 * whole
    assert loose > 3 * greedy  # without the order nothing much is saved
