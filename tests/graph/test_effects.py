"""What is known of op types; what is not known is not touched."""

from __future__ import annotations

import pytest
import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.python.framework import op_def_registry as registry

from tflms.graph import effects

assert tf.__version__  # imported for the op types that it registers


@pytest.mark.parametrize("name", ["TheirOwnKernel", "XlaLaunch", "relu", "", "MatMulV9"])
def test_an_unknown_type_is_taken_for_the_worst(name):
    facts = effects.of(name)
    assert not (facts.known or facts.pure or facts.movable)
    assert not effects.signals(name, [])


@pytest.mark.parametrize(
    "name", ["RandomUniform", "RandomStandardNormal", "Multinomial", "RandomShuffle"]
)
def test_what_draws_is_neither_pure_nor_movable(name):
    facts = effects.of(name)
    assert facts.random
    assert not facts.pure
    assert not facts.movable


@pytest.mark.parametrize("name", ["VarHandleOp", "VariableV2"])
def test_variables_stay_where_they_are(name):
    assert effects.owns_variable(name)
    assert not (effects.of(name).pure or effects.of(name).movable)


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("AssignVariableOp", (0,)),
        ("AssignSub", (0,)),
        ("ResourceScatterUpdate", (0,)),
        ("ResourceApplyGradientDescent", (0,)),
        ("ApplyMomentum", (0, 1)),
        ("ResourceApplyAdam", (0, 1, 2)),
        ("SparseApplyAdagrad", (0, 1)),
    ],
)
def test_writers_know_what_they_overwrite(name, slots):
    facts = effects.of(name)
    assert facts.writes == slots
    assert not (facts.pure or facts.movable)


def test_reading_a_variable_is_no_pure_function():
    facts = effects.of("ReadVariableOp")
    assert facts.reads == (0,)
    assert not facts.pure


@pytest.mark.parametrize("name", sorted(effects.CONTROL_FLOW | effects.FUNCTIONAL))
def test_control_flow_and_calls_are_opaque(name):
    facts = effects.of(name)
    assert not (facts.pure or facts.movable)


@pytest.mark.parametrize("name", ["Placeholder", "IteratorGetNext", "PyFunc", "QueueDequeueV2"])
def test_what_enters_the_graph_stays_on_the_device(name):
    assert not effects.of(name).movable


def test_shapes_may_be_computed_again_but_are_not_worth_moving():
    facts = effects.of("Shape")
    assert facts.pure
    assert not facts.movable
    assert effects.takes_shape("Shape")
    assert not effects.takes_shape("Fill")


def test_a_product_that_may_be_fused_with_its_reader_is_no_signal():
    assert effects.signals("MatMul", ["MatMul"])
    assert not effects.signals("MatMul", ["MatMul", "BiasAdd"])
    assert not effects.signals("Conv2D", ["FusedBatchNormV3"])
    assert effects.signals("ReluGrad", ["BiasAdd"])
    assert not effects.signals("Relu", [])


def test_every_type_in_the_table_is_one_that_tensorflow_has():
    missing = [
        name
        for name, facts in effects._TABLE.items()
        if registry.get(name) is None
        and not name.startswith("_")  # made by the runtime alone
        and not facts.writes  # optimizer kernels: not each of them comes in all forms
    ]
    assert missing == []


def test_no_stateful_type_is_called_pure():
    wrong = [
        name
        for name, facts in effects._TABLE.items()
        if facts.pure and (op := registry.get(name)) is not None and op.is_stateful
    ]
    assert wrong == []


def test_no_pure_type_takes_a_handle_or_a_reference():
    wrong = []
    for name, facts in effects._TABLE.items():
        op = registry.get(name)
        if facts.pure and op is not None:
            handles = [a for a in op.input_arg if a.is_ref or a.type == types_pb2.DT_RESOURCE]
            wrong += [name] if handles else []
    assert wrong == []


def test_what_takes_a_variable_by_reference_is_known_to_write_or_passes_it_on():
    wrong = []
    for name, facts in effects._TABLE.items():
        op = registry.get(name)
        if op is None or facts.writes or name in effects.CONTROL_FLOW:
            continue
        wrong += [name] if any(a.is_ref for a in op.input_arg) else []
    assert wrong == []
