"""Every case with both strategies: the same numbers, and nothing of the user's is lost."""

from __future__ import annotations

import functools

import keras
import pytest
import tensorflow as tf

import tflms
from tests.cases import cases

v1 = tf.compat.v1
SETTINGS = {
    "chain_rule": {"min_swap_bytes": 0, "strategy": "chain_rule", "swap_branches": True},
    "direct_order": {"min_swap_bytes": 0, "strategy": "direct_order", "lb": 2},
}
SLOW = "chain_1000_layers"
# Where both strategies leave all as it is: every activation goes through a tf.cond or an operation
# with an effect, or is read again too soon; in the last, all on the way back may be fused or folded
# by Grappler, so that nothing may be waited for without a change of last bits.
UNCHANGED = {
    "grad_accumulation_cond_apply",
    "forward_counter_print_assert",
    "custom_gradient_straight_through",
}


def build(name):
    keras.utils.set_random_seed(7)
    return cases.CASES[name]()


def targets(case):
    ops = [run.op for run in case.plan or [] if run.op is not None]
    ops += [] if case.train_op is None else [case.train_op]
    return [*case.fetches.values(), *dict.fromkeys(ops)]


@functools.cache
def plain(name):
    """What comes out without a rewrite; a second build says the same, or nothing could be told."""
    return cases.run_graph(build(name))


def attributes(graph):
    return {
        op.name: (op.type, tuple(op.colocation_groups()), {
            key: value.SerializeToString(deterministic=True)
            for key, value in op.node_def.attr.items()
        }, tuple((t.name, t.dtype, str(t.shape)) for t in op.outputs))
        for op in graph.get_operations()
    }  # fmt: skip


def counted(graph):
    """How often each type of operation with an effect occurs."""
    found = {}
    for op in graph.get_operations():
        if op.op_def.is_stateful:
            found[op.type] = found.get(op.type, 0) + 1
    return found


def waits(graph):
    return {op.name: [c.name for c in op.control_inputs] for op in graph.get_operations()}


@pytest.mark.parametrize("strategy", SETTINGS)
@pytest.mark.parametrize("name", cases.CASES)
def test_a_rewritten_graph_does_what_it_did(name, strategy):
    case = build(name)
    graph = case.graph
    before = attributes(graph), cases.devices_of(graph), waits(graph), counted(graph)
    report = tflms.rewrite(
        graph, SETTINGS[strategy], loss=case.fetches["loss"], fetches=targets(case)
    )
    after = attributes(graph), cases.devices_of(graph), waits(graph), counted(graph)
    for index in (0, 1):  # G2, G4
        assert {op: after[index][op] for op in before[index]} == before[index]
    for op, controls in before[2].items():
        assert after[2][op][: len(controls)] == controls  # G4; new ones come behind
    assert after[3] == before[3]  # G3
    assert cases.collections_of(graph) == case.collections  # G5
    swapped = {swap.value for swap in report.swaps}
    assert not swapped & {value.removesuffix(":0") for value in case.untouchable}  # G8
    assert bool(swapped) == (name not in UNCHANGED)
    got = cases.run_graph(case)  # G7: it would hang or fail; `check` and `after` run, too
    if case.exact:
        cases.assert_same(plain(name), got)  # G1


@pytest.mark.parametrize("name", [n for n in cases.CASES if n not in (SLOW, *UNCHANGED)])
def test_what_was_inserted_is_there_when_it_runs_and_only_then(name):
    case = build(name)
    report = tflms.rewrite(
        case.graph, SETTINGS["direct_order"], loss=case.fetches["loss"], fetches=targets(case)
    )
    found = report.verify(case.config)
    assert found.ok, found.missing
    # G6: what a run of the loss alone needs is found in the graph, as a session would prune it. The
    # forward phase waits for what leaves, so that leaves there, too; nothing comes back.
    loss = case.fetches["loss"].op.name
    needed = v1.graph_util.extract_sub_graph(case.graph.as_graph_def(), [loss])
    added = {node.name for node in needed.node if "--tflms/" in node.name}
    assert not any("swap_in" in name for name in added)
    assert all("swap_out" in name or "identity" in name for name in added)


@pytest.mark.parametrize(
    "name", ["model_parallel_two_devices", "many_backward_consumers", "vgg_front_heavy"]
)
def test_the_useful_values_are_among_what_is_swapped(name):
    case = build(name)
    report = tflms.rewrite(
        case.graph, SETTINGS["direct_order"], loss=case.fetches["loss"], fetches=targets(case)
    )
    swapped = {swap.value + ("" if ":" in swap.value else ":0") for swap in report.swaps}
    assert swapped & set(case.interesting)


def test_frozen_layers_are_not_parked():
    case = build("frozen_backbone")
    report = tflms.rewrite(
        case.graph, SETTINGS["direct_order"], loss=case.fetches["loss"], fetches=targets(case)
    )
    swapped = {f"{swap.value}:0" for swap in report.swaps}
    assert not swapped & set(case.extra["not_needed_in_backward"])
