"""Functions that no single value cuts: the same losses and variables, bit by bit."""

from __future__ import annotations

import pytest

from tests.support.emulated import run_on_emulator

# In a process of its own, where operations run one at a time: else plain training does not always
# equal itself, as the sum of several gradients starts with the one that is there first.
CODE = """
import tflms
from tests.checkpointing import steps

tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.experimental.enable_op_determinism()
configs = [
    {"strategy": "recompute_all"},
    {"strategy": "periodic"},
    {"strategy": "optimal_checkpointing", "memory_limit": 0.96},
]
result = {}
for kind in kinds:
    plain, again = (steps.run(kind, tf.function) for _ in range(2))
    assert plain == again, f"the plain {kind} does not equal itself"
    for config in configs:
        made = []
        def rewriting(step):
            made.append(tflms.function(step, config))
            return made[0]
        found = steps.run(kind, rewriting)
        report = made[0].report()
        result[f"{kind} {config['strategy']}"] = {
            "differs": [key for key in plain if found.get(key) != plain[key]],
            "recomputed": len(report.recomputes),
            "notes": list(report.notes),
            "share": report.predicted_peak_bytes / report.plain_peak_bytes,
        }
"""
KINDS = ("unet", "lstm", "gan", "penalty", "mixed", "rows")
STRATEGIES = {"recompute_all": 1.0, "periodic": 1.0, "optimal_checkpointing": 0.96}


@pytest.fixture(scope="module")
def trained():
    return run_on_emulator(CODE, memory_bytes=None, kinds=KINDS)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_gives_the_same_numbers_whatever_is_recomputed(trained, kind, strategy):
    found = trained[f"{kind} {strategy}"]
    assert found["differs"] == []
    assert found["recomputed"] > 0, found["notes"]
    assert found["share"] <= STRATEGIES[strategy]


def test_the_report_names_the_skips_that_are_kept(trained):
    notes = trained["unet optimal_checkpointing"]["notes"]
    assert any("kept across stages" in note for note in notes), notes
