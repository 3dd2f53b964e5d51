"""Few bytes of gradients of weights are in memory at a time."""

from __future__ import annotations

import tflms
from tflms.zoo import graphs


def test_a_large_gradient_waits_for_the_update_before_it():
    made = graphs.mlp(6, width=64, batch=128)
    config = {"strategy": "optimal_checkpointing", "memory_limit": 0.9, "batch_size": 128}
    tflms.rewrite(made.graph, config, loss=made.loss, fetches=[made.loss, made.train_op])
    updates = {
        op.inputs[2].op.inputs[0].op.name: op  # behind the identity that minimize() adds
        for op in made.graph.get_operations()
        if op.type == "ResourceApplyGradientDescent"
    }
    waiting = [
        (name, before.name)
        for name in updates
        for before in made.graph.get_operation_by_name(name).control_inputs
        if before in updates.values()
    ]
    # Of six: the first one waits for none, and the one of the first layer ends the row.
    assert len(waiting) >= 4
    assert len({name for name, _ in waiting}) == len({before for _, before in waiting})
    assert all(updates[name].name != before for name, before in waiting)


def test_small_gradients_are_left_alone():
    made = graphs.mlp(6, width=8, batch=2048)
    config = {"strategy": "optimal_checkpointing", "memory_limit": 0.9, "batch_size": 2048}
    tflms.rewrite(made.graph, config, loss=made.loss, fetches=[made.loss, made.train_op])
    updates = [o for o in made.graph.get_operations() if o.type == "ResourceApplyGradientDescent"]
    assert not any(
        before in updates for op in made.graph.get_operations() for before in op.control_inputs
        if op.type == "MatMul"
    )  # fmt: skip


def test_of_gradients_that_are_small_each_few_are_in_memory_together():
    made = graphs.mlp(24, width=64, batch=1024)
    limit = 3_000_000  # 2 % of it hold three gradients of 16 kB
    config = {"strategy": "optimal_checkpointing", "memory_limit": limit, "batch_size": 1024}
    tflms.rewrite(made.graph, config, loss=made.loss, fetches=[made.loss, made.train_op])
    updates = [o for o in made.graph.get_operations() if o.type == "ResourceApplyGradientDescent"]
    order = [update.inputs[2].op.inputs[0].op for update in updates][::-1]  # last layer first
    made_by = {gradient.name: place for place, gradient in enumerate(order)}
    update_of = {update.name: made_by[update.inputs[2].op.inputs[0].op.name] for update in updates}
    waits = {
        made_by[gradient.name]: [update_of[c.name] for c in gradient.control_inputs
                                 if c.name in update_of]
        for gradient in order
    }  # fmt: skip
    assert all(before == [place - 3] for place, before in waits.items() if 3 <= place < 23)
    assert not any(waits[place] for place in range(3))
