from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.local_updates.local_nets import compiled, digest, losses, mlp
from tflms.local_updates import LocalTrainer, split
from tflms.local_updates.study import Run, frontier, gradient_cosines, study


def teacher(examples=2000, width=16, classes=5):
    """Labels that a random network gives: learnable, with some depth."""
    random = np.random.default_rng(0)
    x = random.normal(size=(examples, width)).astype("float32")
    hidden = np.maximum(x @ random.normal(size=(width, 64)), 0)
    return x, (hidden @ random.normal(size=(64, classes))).argmax(1).astype("int32")


def trainer(method, chunks=None):
    model = mlp(depth=4, dropout=0, norm=False)
    return LocalTrainer(model, split(model, chunks=chunks), method=method)


@pytest.mark.parametrize("method", ["greedy", "overlapping", "backprop", "last"])
def test_the_last_chunk_has_the_true_gradient_and_measuring_changes_nothing(method):
    x, y = teacher()
    made = compiled(trainer(method))
    before = digest(made)
    found = gradient_cosines(made, x[:64], y[:64])
    assert digest(made) == before
    assert found[-1] == pytest.approx(1, abs=1e-6)
    if method == "backprop":
        assert found == pytest.approx([1] * 5, abs=1e-6)
    elif method == "last":
        assert found[:-1] == [0] * 4
    else:
        assert all(value < 0.999 for value in found[:-2])


def test_a_study_counts_steps_cost_and_time_and_draws_the_frontier(tmp_path):
    data = teacher()
    runs = study(
        {
            "backprop": lambda batch: trainer("backprop"),
            "2 chunks": lambda batch: trainer("chunked", 2),
            "greedy": lambda batch: trainer("greedy"),
        },
        data,
        batch_sizes=[32, 128],
        cutoff=1.0,
        steps=150,
        optimizer=lambda: keras.optimizers.Adam(3e-3),
        loss=losses(),
        picture=tmp_path / "frontier.png",
    )
    assert len(runs) == 6
    by_name = {(run.method, run.batch_size): run for run in runs}
    assert by_name["backprop", 128].steps is not None
    for run in runs:
        assert run.losses[-1] < run.losses[0]
    whole, local = by_name["backprop", 128], by_name["greedy", 128]
    if local.steps is not None:
        assert local.time_flops / local.steps < whole.time_flops / whole.steps
    assert (tmp_path / "frontier.png").stat().st_size > 1000


def test_the_frontier_keeps_what_no_run_beats_in_cost_and_time():
    def run(name, cost, time):
        return Run(name, 1, 1, (), cost, time)

    runs = [run("a", 1, 9), run("b", 2, 5), run("c", 3, 6), run("d", 4, 1)]
    runs.append(Run("never", 1, None, (), None, None))
    assert [r.method for r in frontier(runs)] == ["a", "b", "d"]
