"""Applies rules: checks, edits through the IR's gate, checks again; a failed check leaves a reason.

Policy and mechanism are apart: strategies propose an ``Application``, rules say what is legal, and
only this module edits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tflms.errors import InvariantError, RuleError
from tflms.graph.erase import original
from tflms.graph.ir import Graph, Op, OpId, Use, ValueId
from tflms.graph.names import inserted
from tflms.graph.order import Phases, Reach
from tflms.rewriting import replays, ruleset
from tflms.rewriting.conditions import Env
from tflms.rewriting.ruleset import Rule, Statement

_log = logging.getLogger(__name__)
_VOCABULARY = replays.VOCABULARY  # all of it: what computes again adds to the common conditions


@dataclass(frozen=True, slots=True)
class Application:
    """A rule and what its metavariables stand for.

    Values, operations, tuples of uses, and mappings from a value to what is read instead of it.
    """

    rule: str
    bindings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Applied:
    """A rule that was applied, with the names of what it made."""

    rule: str
    made: dict[str, int]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a rule was not applied, and the operations to look at."""

    rule: str
    reason: str
    culprits: tuple[str, ...] = ()


class Engine:
    """Applies rules to one graph."""

    def __init__(
        self,
        graph: Graph,
        phases: Phases,
        *,
        host_device: str = "/cpu:0",
        order: Sequence[OpId] | None = None,
    ) -> None:
        """Prepare a graph for rewriting; ``order`` is a planned topological order of all of it."""
        self.graph = graph
        self.phases = phases
        self.host_device = host_device
        self.refusals: list[Refusal] = []
        self.applied: list[Applied] = []
        self._log: list[tuple[int, Application, Applied]] = []
        self._rules = ruleset.load_all()
        position = [0] * graph.size
        for place, op in enumerate(phases.order if order is None else order):
            position[op] = place
        self._env = Env(
            graph=graph,
            reach=Reach(graph, position),
            witness={op.id: (position[op.id], 0) for op in graph.ops()},
            guard=phases.guard,
            forward=phases.forward,
            needed_by=phases.needed_by,
        )
        self._count = 0

    @property
    def reach(self) -> Reach:
        """Reachability on the graph as it is now."""
        return self._env.reach

    def apply(self, application: Application) -> Applied | Refusal:
        """Apply a rule, or say why not; a refusal changes nothing and is kept.

        Raises:
            RuleError: there is no such rule, or the bindings do not fit it.
            InvariantError: the rule broke what it ensures.
        """
        rule = self._rules.get(application.rule)
        if rule is None:
            raise RuleError(f"no rule {application.rule!r}; there are {', '.join(self._rules)}")
        self._bind(rule, application.bindings)
        refusal = self._mismatch(rule)
        for call in rule.requires:
            if refusal is None:
                refusal = _VOCABULARY[call.name](self._env, *call.args)
        if refusal is not None:
            return self._refuse(rule, refusal)
        self._forget_rolled_back()
        mark = len(self.graph.journal)
        made: dict[str, int] = {}
        try:
            for statement in rule.after:
                self._run(statement, made)
        except InvariantError:
            self.graph.rollback(mark)
            raise
        for call in rule.ensures:
            reason = _VOCABULARY[call.name](self._env, *call.args)
            if reason is not None:
                self.graph.rollback(mark)
                raise InvariantError(f"rule {rule.name!r} does not ensure {call}: {reason}")
        done = Applied(rule.name, made)
        self.applied.append(done)
        self._log.append((len(self.graph.journal), application, done))
        _log.debug("%s applied: %s", rule.name, made)
        return done

    @property
    def log(self) -> list[tuple[Application, Applied]]:
        """What was applied and not rolled back, in order: the rewrite as rule applications."""
        self._forget_rolled_back()
        return [(application, done) for _, application, done in self._log]

    @property
    def witness(self) -> list[OpId]:
        """All operations in an order that every edge agrees with, inserted ones in their places."""
        place = self._env.witness
        return sorted((op.id for op in self.graph.ops()), key=lambda op: place[op])

    def place(self, op: OpId) -> tuple[int, int]:
        """Return where an operation stands in that order, inserted or not."""
        return self._env.witness[op]

    def _forget_rolled_back(self) -> None:
        while self._log and self._log[-1][0] > len(self.graph.journal):
            self._log.pop()

    def _bind(self, rule: Rule, given: Mapping[str, Any]) -> None:
        bindings: dict[str, Any] = {}
        for name, kind in rule.given:
            if name not in given:
                raise RuleError(f"rule {rule.name!r} is given no {name!r}")
            bound = given[name]
            bindings[name] = tuple(bound) if kind == "Uses" else bound
            if kind == "Swaps":
                bindings[name] = dict(bound)
            bindings[f"{name}!kind"] = kind
        self._env.bindings = bindings
        self._env.touched = []

    def _refuse(self, rule: Rule, reason: str) -> Refusal:
        env, culprits = self._env, []
        for name, kind in rule.given:
            if kind == "Value":
                culprits.append(self.graph.value_name(env.value(name)))
            elif kind == "Op":
                culprits.append(self.graph.op(env.op(name)).name)
            elif kind == "Uses":
                culprits += [self.graph.op(use.op).name for use in env.uses(name)]
        refusal = Refusal(rule.name, reason, tuple(dict.fromkeys(culprits)))
        self.refusals.append(refusal)
        _log.debug("%s refused: %s", rule.name, reason)
        return refusal

    def _mismatch(self, rule: Rule) -> str | None:
        """Check the ``before`` statements against the bindings; bind what they name on the way."""
        env, graph = self._env, self.graph
        for statement in rule.before:
            if statement.form == "make":
                op = graph.producer(env.value(statement.name))
                if statement.host and not op.role.startswith("swap"):
                    return f"{op.name!r} is no copy on the host"
                if statement.type == "Identity" and statement.source != "...":
                    env.bindings.setdefault(statement.source, op.inputs[0])
                    env.bindings.setdefault(f"{statement.source}!kind", "Value")
                    if op.inputs[0] != env.value(statement.source):
                        return f"{op.name!r} does not copy {statement.source}"
                if statement.after:
                    if not op.controls:
                        return f"{op.name!r} waits for nothing"
                    env.bindings.setdefault(statement.after, op.controls[0])
                    env.bindings.setdefault(f"{statement.after}!kind", "Op")
            elif statement.form == "move":
                for use in env.uses(statement.name):
                    if graph.op(use.op).inputs[use.slot] != env.value(statement.source):
                        return f"{env.name(use.op)} does not read {statement.source} there"
        return None

    def _run(self, statement: Statement, made: dict[str, int]) -> None:
        env, graph = self._env, self.graph
        if statement.form == "make":
            op = self._make(statement)
            env.bindings[statement.name] = op.outputs[0]
            env.bindings[f"{statement.name}!kind"] = "Value"
            made[statement.name] = op.id
        elif statement.form == "move":
            uses = tuple(env.uses(statement.name))
            for use in uses:
                self._touch(use)
                graph.rewire(use, self._replacement(use, env.value(statement.source)))
        elif statement.form == "drop":
            graph.drop(env.op(statement.name))
        else:
            op_id, after = env.op(statement.name), env.op(statement.after)
            graph.add_control(op_id, after)
            if statement.instead_of:
                graph.remove_control(op_id, env.op(statement.instead_of))
            if graph.op(op_id).role:
                self._place(graph.op(op_id))
            for slot in range(len(graph.op(op_id).inputs)):
                self._touch(Use(op_id, slot))

    def _replacement(self, use: Use, value: ValueId) -> ValueId:
        """What a use reads from now on: of a clone with several outputs, the one it read before."""
        maker = self.graph.producer(value)
        if not maker.repeats:
            return value
        return maker.outputs[self.graph.value(self.graph.op(use.op).inputs[use.slot]).index]

    def _touch(self, use: Use) -> None:
        now = self.graph.op(use.op).inputs[use.slot]
        self._env.touched.append((use, original(self.graph, now)))

    def _make(self, statement: Statement) -> Op:
        env, graph = self._env, self.graph
        controls = [env.op(statement.after)] if statement.after else []
        if statement.type == "Clone":
            return self._clone(env.op(statement.source), controls, host=statement.host)
        value = env.value(statement.source)
        v, source = graph.value(value), graph.producer(value)
        role = "own" if statement.type == "DeepCopy" else "identity"
        if statement.host:
            role = "swap_in" if source.role in ("swap_out", "swap_join") else "swap_out"
        elif statement.after:
            role = "seed"  # the first value of what is computed again
        root = graph.value(original(graph, value))
        op = graph.add(
            self._fresh(inserted(graph.op(root.op).name, root.index, role)),
            statement.type,
            inputs=[value],
            controls=controls,
            outputs=[(v.dtype, v.shape)],
            device=self.host_device if statement.host else source.device,
            frame=source.frame,
            role=role,
        )
        self._place(op)
        return op

    def _clone(self, origin: OpId, controls: list[OpId], *, host: bool) -> Op:
        """Repeat an operation; inputs that ``swapped`` maps are read from there instead."""
        graph, twin = self.graph, self.graph.op(origin)
        mapped: Mapping[ValueId, ValueId] = self._env.bindings.get("swapped", {})
        role = "swap_join" if host else "clone"
        op = graph.add(
            self._fresh(inserted(twin.name, 0, role)),
            twin.type,
            inputs=[mapped.get(v, v) for v in twin.inputs],
            controls=controls,
            outputs=[(graph.value(v).dtype, graph.value(v).shape) for v in twin.outputs],
            device=self.host_device if host else twin.device,
            frame=twin.frame,
            role=role,
            origin=origin,
        )
        self._place(op)
        return op

    def _place(self, op: Op) -> None:
        """Give an inserted operation its place in the witness order: just behind what it needs."""
        self._count += 1
        before = [self._env.witness[p][0] for p in self.graph.predecessors(op.id)]
        self._env.witness[op.id] = (max(before, default=0), self._count)

    def _fresh(self, name: str) -> str:
        if self.graph.find(name) is None:
            return name
        number = 1
        while self.graph.find(f"{name}_{number}") is not None:
            number += 1
        return f"{name}_{number}"
