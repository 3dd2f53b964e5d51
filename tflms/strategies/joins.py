"""Has concatenations put together on the host that alone set what no plan can go below.

A concatenation holds its parts beside its result, which is as large as they are together: in a
U-Net that is more than any other operation holds. Its parts go to the host, where they are put
together, and the device gets the result once for each time that it reads it. The link carries no
more than for parking the result, which needs no copy out any more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tflms.graph import effects
from tflms.graph.ir import Graph, Op, OpId, Use, ValueId
from tflms.graph.order import Phases, replaced
from tflms.planning import kernels
from tflms.planning.cost import Costs, Sizes
from tflms.planning.floor import demands
from tflms.rewriting.engine import Application, Applied, Engine
from tflms.strategies.lines import Chain
from tflms.strategies.parking import wait_for_returns
from tflms.strategies.swap import Swapped

_TOGETHER = 16  # operations of the order: reads that are so near share one copy back
_LOOKED_BACK = 40  # operations of the order, for one that may start a copy back


@dataclass(frozen=True, slots=True)
class Joined:
    """A concatenation that the host does.

    Attributes:
        op: the user's operation.
        join: what does the same on the host.
        parts: copies of its parts there.
        groups: per copy back, that and the uses that it serves.
    """

    op: OpId
    join: OpId
    parts: tuple[OpId, ...]
    groups: tuple[tuple[OpId, tuple[Use, ...]], ...]


def candidates(
    graph: Graph,
    phases: Phases,
    weights: Sizes,
    costs: Costs,
    order: Sequence[OpId],
    may_leave: Collection[ValueId],
) -> list[OpId]:
    """Return the concatenations that hold more at once than all else does, in planned order."""
    found = demands(graph, weights, costs, order)
    able = {d.op for d in found if _may_be_replaced(graph, phases, weights, d.op, may_leave)}
    most = max((d.nbytes for d in found if d.op not in able), default=0)
    return [d.op for d in found if d.op in able and d.nbytes > most]


def _may_be_replaced(
    graph: Graph, phases: Phases, weights: Sizes, op_id: OpId, may_leave: Collection[ValueId]
) -> bool:
    op = graph.op(op_id)
    return (
        effects.gathers(op.type)
        and not (op.frame or phases.guard[op_id] or op.controls or graph.control_users(op_id))
        and op_id not in phases.targets
        and op.outputs[0] in may_leave
        and all(
            v in may_leave and phases.activation[v] and weights.on_device[graph.value(v).op]
            for v in op.inputs[:-1]
        )
    )


def run(engine: Engine, ops: Sequence[OpId], order: Sequence[OpId]) -> list[Joined]:
    """Have the host put together what concatenations would; all of them, or none.

    Args:
        engine: of the graph.
        ops: the concatenations, in planned order.
        order: the operations of the step, as planned.
    """
    mark = len(engine.graph.journal)
    joining = _Joining(engine, ops, order)
    for op in ops:
        if not joining.join(engine.graph.op(op)):
            engine.graph.rollback(mark)
            return []
    return joining.done


class _Joining:
    def __init__(self, engine: Engine, ops: Iterable[OpId], order: Sequence[OpId]) -> None:
        self.engine, self.graph, self.phases = engine, engine.graph, engine.phases
        self.ops, self.order = frozenset(ops), order
        self.place = {op: at for at, op in enumerate(order)}
        self.on_host: dict[ValueId, ValueId] = {}
        self.done: list[Joined] = []

    def join(self, op: Op) -> bool:
        """Apply the rules to one concatenation; False where one of them refuses."""
        graph, value = self.graph, op.outputs[0]
        parts: list[OpId] = []
        for part in dict.fromkeys(op.inputs[:-1]):
            if part not in self.on_host:
                made = self.engine.apply(Application("park", {"v": part}))
                if not isinstance(made, Applied):
                    return False
                self.on_host[part] = graph.op(OpId(made.made["h"])).outputs[0]
                parts.append(OpId(made.made["h"]))
        swapped = {part: self.on_host[part] for part in op.inputs[:-1]}
        made = self.engine.apply(Application("join_on_host", {"f": op.id, "swapped": swapped}))
        if not isinstance(made, Applied):
            return False
        join = OpId(made.made["c"])
        self.on_host[value] = graph.op(join).outputs[0]
        groups: list[tuple[OpId, tuple[Use, ...]]] = []
        for uses in self._groups(value):
            back = self._bring_in(op, self.on_host[value], uses)
            if back is None:
                return False
            groups.append((back, uses))
        self.done.append(Joined(op.id, join, tuple(parts), tuple(groups)))
        return True

    def _groups(self, value: ValueId) -> list[tuple[Use, ...]]:
        """The uses that share a copy back; shapes, which are known before, come with the first."""
        graph, place, forward = self.graph, self.place, self.phases.forward
        uses = [u for u in graph.uses(value) if u.op in place and u.op not in self.ops]
        shapes = [u for u in uses if kernels.reads_shape_only(graph, graph.op(u.op))]
        data = sorted((u for u in uses if u not in shapes), key=lambda u: (place[u.op], u.slot))
        groups: list[list[Use]] = []
        for use in data:
            last = groups[-1][-1].op if groups else None
            if (
                last is None
                or forward[last] != forward[use.op]
                or place[use.op] - place[last] > _TOGETHER
            ):
                groups.append([])
            groups[-1].append(use)
        if shapes and not groups:
            groups.append([])
        if groups:
            groups[0] += shapes
        return [tuple(group) for group in groups]

    def _bring_in(self, op: Op, joined: ValueId, uses: tuple[Use, ...]) -> OpId | None:
        """Start a copy back behind the nearest operation that all its uses wait for."""
        graph, engine = self.graph, self.engine
        last_part = max((graph.value(v).op for v in op.inputs[:-1]), key=lambda o: self.place[o])
        first = min(self.place[use.op] for use in uses)
        near = self.order[max(first - _LOOKED_BACK, self.place[last_part] + 1) : first][::-1]
        for anchor in (*(o for o in near if self._starts(o)), last_part):
            if not all(engine.reach.precedes(anchor, use.op) for use in uses):
                continue
            bindings = {"c": joined, "late": uses, "anchor": anchor}
            made = engine.apply(Application("bring_in", bindings))
            return OpId(made.made["w"]) if isinstance(made, Applied) else None
        return None

    def _starts(self, op_id: OpId) -> bool:
        """Tell whether a copy may wait for an operation without a change of any number."""
        op, graph = self.graph.op(op_id), self.graph
        if op.role or op.frame or self.phases.guard[op_id] or op_id in self.ops:
            return False
        return not self.phases.forward[op_id] and effects.signals(
            op.type, graph.reader_types(op_id)
        )


def settle(engine: Engine, links: Chain, joined: Sequence[Joined]) -> None:
    """Once the order is fixed: copies come back no sooner than needed, and what is next waits."""
    graph = engine.graph
    gone = replaced(graph)
    firm = [op for op in links.ops if op in links.firm]
    for one in joined:
        for part in one.parts:
            value = graph.op(part).inputs[0]
            readers = [use.op for use in graph.uses(value) if not graph.op(use.op).role]
            held = [graph.value(value).op, *(r for r in readers if r not in gone)]
            last = max(engine.place(o) for o in held if engine.phases.step[o])
            gate = next((op for op in firm if engine.place(op) > last), None)
            if gate is not None and links.may_wait(gate, graph.value(value).op):
                engine.apply(Application("order", {"a": part, "b": gate}))
        for back, uses in one.groups:
            _delay(engine, links, back, uses)
    wait_for_returns(engine, links, [as_swapped(engine, one) for one in joined])


def _delay(engine: Engine, links: Chain, back: OpId, uses: tuple[Use, ...]) -> None:
    graph = engine.graph
    data = [u for u in uses if not kernels.reads_shape_only(graph, graph.op(u.op))]
    if not data:
        return
    first = min(engine.place(use.op) for use in data)
    old = graph.op(back).controls[0]
    between = [o for o in links.ops if engine.place(old) < engine.place(o) < first]
    for anchor in between[: -_LOOKED_BACK - 1 : -1]:
        if engine.reach.precedes(old, anchor) and all(
            engine.reach.precedes(anchor, use.op) for use in uses
        ):
            bindings = {"w": graph.op(back).outputs[0], "anchor": anchor}
            engine.apply(Application("delay_swap_in", bindings))
            return


def as_swapped(engine: Engine, one: Joined) -> Swapped:
    """Describe what the host puts together as a value that is parked."""
    graph, level = engine.graph, engine.phases.level
    back = min((level[graph.op(w).controls[0]] for w, _ in one.groups), default=level[one.op])
    return Swapped(graph.op(one.op).outputs[0], one.join, one.groups, level[one.op], back)


def joined_in(engine: Engine) -> list[Joined]:
    """Return what the host puts together, as the rewritten graph shows it."""
    graph = engine.graph
    found: list[Joined] = []
    for op in graph.ops():
        if op.role == "swap_join" and op.origin is not None:
            backs = [u.op for u in graph.uses(op.outputs[0]) if graph.op(u.op).role == "swap_in"]
            groups = tuple((w, tuple(graph.uses(graph.op(w).outputs[0]))) for w in backs)
            makers = (graph.producer(v) for v in op.inputs[:-1])
            parts = tuple(maker.id for maker in makers if maker.role == "swap_out")
            found.append(Joined(op.origin, op.id, parts, groups))
    return found
