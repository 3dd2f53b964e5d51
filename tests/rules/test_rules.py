"""Every rule file's examples and refusals, run through the engine."""

import pytest

from tflms.graph import erase, order, text, verify
from tflms.rewriting import ruleset
from tflms.rewriting.engine import Application, Applied, Engine, Refusal

RULES = ruleset.load_all()
EXAMPLES = [(r.name, i) for r in RULES.values() for i in range(len(r.examples))]
REFUSALS = [(r.name, i) for r in RULES.values() for i in range(len(r.refusals))]


def apply(rule, case):
    graph = text.parse(case["before"])
    topological = order.topological(graph)
    named = [case["bind"][n] for n in ("reader", "sibling") if n in case["bind"]]
    planned = [text.op_named(graph, name) for name in named or case.get("planned", ())]
    if planned:
        topological = order.with_edges(graph, topological, [tuple(planned)])
    every = set(topological)
    forward = set(case.get("forward", ()))
    ends = [text.op_named(graph, name) for name in case.get("targets", ())]
    phases = order.Phases(
        order=tuple(topological),
        level=tuple(order.levels(graph, topological, every)),
        step=(True,) * graph.size,
        forward=tuple(graph.op(i).name in forward for i in range(graph.size)),
        backward_start=0,
        activation=(True,) * graph.value_count,
        guard=tuple(order.guards(graph, topological)),
        needed_by=order._needed_by(graph, topological, ends),
    )
    engine = Engine(graph, phases)
    bindings = {}
    for name, kind in rule.given:
        bound = case["bind"][name]
        if kind == "Value":
            bindings[name] = text.value_named(graph, bound)
        elif kind == "Op":
            bindings[name] = text.op_named(graph, bound)
        elif kind == "Swaps":
            names = {text.value_named(graph, v): w for v, w in bound.items()}
            bindings[name] = {v: text.value_named(graph, w) for v, w in names.items()}
        else:
            bindings[name] = tuple(text.use_named(graph, use) for use in bound)
    return graph, engine.apply(Application(rule.name, bindings))


def lines(source):
    return [line.strip() for line in source.strip().splitlines()]


@pytest.mark.parametrize(("name", "index"), EXAMPLES)
def test_example_becomes_what_the_rule_file_shows(name, index):
    case = RULES[name].examples[index]
    graph, outcome = apply(RULES[name], case)
    assert isinstance(outcome, Applied), outcome
    assert lines(text.dump(graph)) == lines(case["after"])
    verify.verify(graph)
    before = text.parse(case["before"])
    erase.check(graph, erase.edges(before)) if not any(op.role for op in before.ops()) else None


@pytest.mark.parametrize(("name", "index"), REFUSALS)
def test_refusal_gives_the_reason_and_changes_nothing(name, index):
    case = RULES[name].refusals[index]
    graph, outcome = apply(RULES[name], case)
    assert isinstance(outcome, Refusal)
    assert case["reason"] in outcome.reason
    assert outcome.culprits
    assert lines(text.dump(graph)) == lines(case["before"])


def test_every_condition_of_every_rule_is_in_the_vocabulary():
    from tflms.rewriting.conditions import VOCABULARY

    for rule in RULES.values():
        for call in (*rule.requires, *rule.ensures):
            assert call.name in VOCABULARY, f"{rule.name}: {call}"
