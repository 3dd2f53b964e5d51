from __future__ import annotations

import keras
import numpy as np

from tests.local_updates.local_nets import losses, mlp
from tflms.local_updates.compare import compare, table


def test_the_comparison_has_a_row_for_each_method_and_for_the_exact_alternatives():
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 16)).astype("float32")
    y = (x[:, :5].argmax(1)).astype("int32")
    rows = compare(
        lambda: mlp(depth=3, dropout=0, norm=False),
        (x, y),
        steps=60,
        batch_size=32,
        optimizer=lambda: keras.optimizers.Adam(5e-3),
        loss=losses(),
    )
    assert [row.method for row in rows] == [
        "backprop",
        "checkpointing (exact)",
        "swapping (exact)",
        "2 chunks",
        "3 chunks",
        "overlapping",
        "greedy",
    ]
    by_name = {row.method: row for row in rows}
    whole = by_name["backprop"]
    assert by_name["checkpointing (exact)"].equal_steps == whole.equal_steps
    assert by_name["checkpointing (exact)"].equal_flops > whole.equal_flops
    assert by_name["greedy"].serial_share < by_name["2 chunks"].serial_share < 1
    assert all(row.equal_steps < 1.7 for row in rows)
    assert len(table(rows).splitlines()) == 8
