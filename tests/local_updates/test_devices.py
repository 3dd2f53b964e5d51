from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("devices_script.py")


@pytest.fixture(scope="module")
def facts():
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment["PYTHONPATH"] = str(SCRIPT.parents[2])
    run = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=170
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_chunks_move_to_their_devices_and_train_the_same(facts):
    for runtime in ("fused", "threads"):
        digest, places = facts[runtime]
        assert places == [["CPU:0"], ["CPU:1"]]
        assert digest == facts["plain"][0]


def test_inside_a_chunk_mirrored_replicas_train_as_one(facts):
    one, two = facts["one replica"], facts["two replicas"]
    assert set(one) == set(two)
    for name, values in one.items():
        np.testing.assert_allclose(values, two[name], rtol=1e-5)
    assert "use runtime='fused'" in facts["refused"]


@pytest.mark.parametrize("runtime", ["fused", "threads"])
def test_a_chunks_step_is_rewritten_for_swapping_with_the_same_weights(facts, runtime):
    assert sum(facts[f"swaps {runtime}"]) > 0
    assert facts[f"rewritten {runtime}"][0] == facts["plain"][0]
