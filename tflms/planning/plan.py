"""A decided rewrite as data: rule applications on a graph's structure, saved, loaded, played again.

Operations are named by their place in the graph and not by name, so a plan fits a graph that the
same program built again; a hash over types, shapes and edges tells whether it does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tflms.config import Config
from tflms.errors import ConfigError, GraphError
from tflms.graph.ir import Graph, OpId, Use, ValueId
from tflms.rewriting import ruleset
from tflms.rewriting.engine import Application, Applied, Engine

PLAN_FORMAT = 1


def structure_hash(graph: Graph) -> str:
    """Return a hash of types, shapes and edges of the user's operations; names do not count."""
    digest = hashlib.sha256()
    for number in range(graph.original_ops):
        op = graph.op(number)
        outputs = [(graph.value(v).dtype, graph.value(v).shape) for v in op.outputs]
        digest.update(repr((op.type, op.inputs, sorted(op.controls), outputs)).encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do to a graph, decided but not done.

    Attributes:
        config: the settings that it was decided with.
        structure: hash of the graph that it is for.
        loss, targets: values and operations that the step was found from, by id.
        order: the planned order of all operations, or None where the executor's is kept.
        steps: rule applications, each a rule's name and its bindings by place.
        plain_peak_bytes, predicted_peak_bytes: predictions without and with the plan.
        plain_seconds, predicted_seconds: likewise, of a step.
        floor_bytes: what no plan can go below; None where it was not computed.
        host_bytes, moved_bytes: parked at one time, and moved to the host in a step.
        notes: what else is to be known, for example that nothing has to change.
    """

    config: dict[str, Any]
    structure: str
    loss: tuple[int, ...]
    targets: tuple[int, ...]
    order: tuple[int, ...] | None
    steps: tuple[tuple[str, dict[str, Any]], ...]
    plain_peak_bytes: int
    predicted_peak_bytes: int
    plain_seconds: float
    predicted_seconds: float
    floor_bytes: int | None = None
    host_bytes: int = 0
    moved_bytes: int = 0
    order_edges: int = 0
    notes: tuple[str, ...] = ()

    @property
    def changes(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.steps)

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file."""
        data = {"format": PLAN_FORMAT, **dataclasses.asdict(self)}
        Path(path).write_text(json.dumps(data) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a JSON file.

        Raises:
            ConfigError: the file cannot be read, or holds no plan of this format.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data.pop("format") != PLAN_FORMAT:
                raise ValueError("it was written in another format; plan again")
            for key in ("loss", "targets", "notes"):
                data[key] = tuple(data[key])
            data["order"] = None if data["order"] is None else tuple(data["order"])
            data["steps"] = tuple((rule, bindings) for rule, bindings in data["steps"])
            Config.from_dict(data["config"])
            return cls(**data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"cannot read a plan from {str(path)!r}: {error}") from None

    def check(self, graph: Graph) -> None:
        """Check that a graph is the one that the plan is for.

        Raises:
            GraphError: it is not.
        """
        if structure_hash(graph) != self.structure:
            raise GraphError(
                f"the plan is for another graph: the structure of this one ({graph.original_ops} "
                "operations) differs in types, shapes or edges; plan again for it (a plan fits "
                "only the same model, batch size and optimizer)"
            )


def record(log: Sequence[tuple[Application, Applied]], graph: Graph) -> tuple[Any, ...]:
    """Turn rule applications into data; what one inserted is named by its number and letter."""
    rules = ruleset.load_all()
    made: dict[int, str] = {}
    steps: list[tuple[str, dict[str, Any]]] = []

    def place(value: ValueId) -> list[int | str]:
        v = graph.value(value)
        return [made.get(v.op, v.op), v.index]

    for number, (application, done) in enumerate(log):
        bindings: dict[str, Any] = {}
        for name, kind in rules[application.rule].given:
            bound = application.bindings[name]
            if kind == "Uses":
                bindings[name] = [[made.get(use.op, use.op), use.slot] for use in bound]
            elif kind == "Swaps":
                bindings[name] = [[place(v), place(w)] for v, w in bound.items()]
            elif kind == "Op":
                bindings[name] = made.get(bound, bound)
            else:
                bindings[name] = place(bound)
        steps.append((application.rule, bindings))
        for letter, op in done.made.items():
            made[op] = f"{number}.{letter}"
    return tuple(steps)


def replay(engine: Engine, steps: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Apply recorded rule applications.

    Raises:
        GraphError: a rule refuses one of them.
    """
    graph = engine.graph
    rules = ruleset.load_all()
    made: dict[str, OpId] = {}

    def op(bound: int | str) -> OpId:
        return made[bound] if isinstance(bound, str) else OpId(bound)

    def value(bound: Sequence[Any]) -> ValueId:
        outputs: list[ValueId] = graph.op(op(bound[0])).outputs
        return outputs[int(bound[1])]

    for number, (rule, given) in enumerate(steps):
        bindings: dict[str, Any] = {}
        for name, kind in rules[rule].given:
            if kind == "Uses":
                bindings[name] = tuple(Use(op(o), slot) for o, slot in given[name])
            elif kind == "Swaps":
                bindings[name] = {value(v): value(w) for v, w in given[name]}
            else:
                bindings[name] = op(given[name]) if kind == "Op" else value(given[name])
        outcome = engine.apply(Application(rule, bindings))
        if not isinstance(outcome, Applied):
            raise GraphError(f"the plan does not fit: rule {rule!r} refuses, {outcome.reason}")
        made |= {f"{number}.{letter}": OpId(made_op) for letter, made_op in outcome.made.items()}
