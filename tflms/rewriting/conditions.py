"""The closed vocabulary of conditions for rules; each returns None or a reason and never raises."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tflms.graph import effects, variables
from tflms.graph.erase import original
from tflms.graph.ir import Graph, OpId, Use, ValueId
from tflms.graph.order import Reach

Guard = frozenset[tuple[ValueId, int]]


@dataclass(slots=True)
class Env:
    """What conditions look at: the graph, the bindings of a rule, and facts of the whole call.

    ``witness`` holds a topological position per operation, inserted ones among them, that every
    edge of the rewritten graph agrees with; it proves the graph free of cycles step by step.
    """

    graph: Graph
    reach: Reach
    witness: dict[OpId, tuple[int, int]]
    guard: Sequence[Guard]
    forward: Sequence[bool]
    needed_by: Sequence[int] = ()
    bindings: dict[str, Any] = field(default_factory=dict)
    touched: list[tuple[Use, ValueId]] = field(default_factory=list)
    seeds: dict[OpId, frozenset[OpId]] = field(default_factory=dict)
    behind: dict[OpId, frozenset[OpId]] = field(default_factory=dict)

    def value(self, name: str) -> ValueId:
        """Return the value bound to a name."""
        return self.bindings[name]

    def uses(self, name: str) -> tuple[Use, ...]:
        """Return the uses bound to a name; of a value, all of its uses."""
        bound = self.bindings[name]
        return bound if isinstance(bound, tuple) else self.graph.uses(bound)

    def op(self, name: str) -> OpId:
        """Return the operation bound to a name; of a value, its producer."""
        kind, bound = self.bindings[f"{name}!kind"], self.bindings[name]
        return self.graph.value(bound).op if kind == "Value" else bound

    def source(self, op: OpId) -> OpId:
        """Return the user's operation that an inserted copy or clone stands for."""
        node = self.graph.op(op)
        while node.role:
            made = self.graph.value(node.inputs[0]).op if node.origin is None else node.origin
            node = self.graph.op(made)
        return node.id

    def guard_of(self, op: OpId) -> Guard:
        """Return the branches that an operation lives in."""
        return self.guard[self.source(op)]

    def needed(self, op: OpId) -> int:
        """Return the targets that may need an operation, as bits.

        A copy touches nothing but its own buffer: wherever its source runs, it may.
        """
        node = self.graph.op(op)
        if node.role == "seed":  # for what is read behind its anchor
            return self.needed(node.controls[0])
        return self.needed_by[self.source(op)]

    def name(self, op: OpId) -> str:
        """Return how people call an operation."""
        return repr(self.graph.op(op).name)


Condition = Callable[..., str | None]
VOCABULARY: dict[str, Condition] = {}


def condition(function: Condition) -> Condition:
    """Put a condition into the vocabulary."""
    VOCABULARY[function.__name__] = function
    return function


@condition
def nonempty(env: Env, uses: str) -> str | None:
    """There is at least one use."""
    return None if env.uses(uses) else f"{uses} is empty"


@condition
def tensor(env: Env, v: str) -> str | None:
    """The value is a plain tensor: no handle, reference, string or container."""
    value = env.graph.value(env.value(v))
    if value.is_tensor:
        return None
    return f"{env.graph.value_name(value.id)!r} is a {value.dtype}, which no rule may cut"


@condition
def movable(env: Env, v: str) -> str | None:
    """A value may leave the device: a known pure operation's tensor, not a variable's buffer."""
    value = env.graph.value(env.value(v))
    op = env.graph.op(value.op)
    if (reason := tensor(env, v)) is not None:
        return reason
    facts = effects.of(op.type)
    if not facts.known:
        return f"{op.name!r} is of the unknown type {op.type}, which is left alone"
    if not facts.movable or op.stateful:
        return f"results of {op.type} ({op.name!r}) stay on the device"
    if op.role:
        return f"{op.name!r} is itself an inserted {op.role}"
    if op.frame:
        return f"{op.name!r} runs in the loop {op.frame!r}, whose values are left alone"
    return None


@condition
def recomputable(env: Env, v: str) -> str | None:
    """The value's operation may run again: pure, known, and touching no variable."""
    op = env.graph.op(env.op(v))
    facts = effects.of(op.type)
    if not facts.known:
        return f"{op.name!r} is of the unknown type {op.type}, which is left alone"
    if not facts.pure or op.stateful or facts.reads or facts.writes:
        return f"{op.name!r} ({op.type}) must run exactly once"
    if variables.touches(env.graph, op.id):  # by then the variable may hold something else
        return f"{op.name!r} ({op.type}) looks at a variable, which may change in between"
    return None


@condition
def same_frame(env: Env, v: str, uses: str) -> str | None:
    """The value's producer and all that read it run in one loop frame."""
    frame = env.graph.op(env.op(v)).frame
    for use in env.uses(uses):
        if env.graph.op(use.op).frame != frame:
            return f"{env.name(use.op)} runs in another loop frame than {env.name(env.op(v))}"
    return None


@condition
def anchored(env: Env, anchor: str, uses: str) -> str | None:
    """Whenever one of the uses runs, the anchor runs before it, alive and in the same frame."""
    a = env.op(anchor)
    for use in env.uses(uses):
        if env.graph.op(a).frame != env.graph.op(use.op).frame:
            return f"anchor {env.name(a)} runs in another loop frame than {env.name(use.op)}"
        guard = env.guard[a] if a < len(env.guard) else frozenset()
        if not guard <= (env.guard[use.op] if use.op < len(env.guard) else guard):
            return f"anchor {env.name(a)} may be dead where {env.name(use.op)} is alive"
    return None


@condition
def precedes(env: Env, anchor: str, uses: str) -> str | None:
    """The anchor is an ancestor of every use: nothing is dragged into a run, no cycle closes."""
    a = env.op(anchor)
    for use in env.uses(uses):
        if a == use.op or not env.reach.precedes(a, use.op):
            return f"anchor {env.name(a)} does not reach {env.name(use.op)}"
    return None


@condition
def starting(env: Env, uses: str) -> str | None:
    """All uses are what a variable is assigned as a whole."""
    for use in env.uses(uses):
        if env.graph.op(use.op).type != "AssignVariableOp" or use.slot != 1:
            return f"{env.name(use.op)} does not assign it to a variable"
    return None


@condition
def distinct(env: Env, a: str, b: str) -> str | None:
    """Two values are not the same."""
    return f"{a} and {b} are the same" if env.value(a) == env.value(b) else None


@condition
def same_source(env: Env, a: str, b: str) -> str | None:
    """Two inserted values are copies of one value."""
    first, second = (env.graph.producer(env.value(n)).inputs for n in (a, b))
    return None if first[:1] == second[:1] else f"{a} and {b} copy different values"


@condition
def is_swap_out(env: Env, v: str) -> str | None:
    """The value is a swap-out that we inserted."""
    return _has_role(env, v, "swap_out")


@condition
def is_swap_in(env: Env, v: str) -> str | None:
    """The value is a swap-in that we inserted."""
    return _has_role(env, v, "swap_in")


@condition
def is_joined(env: Env, v: str) -> str | None:
    """The value was put together on the host."""
    return _has_role(env, v, "swap_join")


@condition
def gathers(env: Env, f: str) -> str | None:
    """The operation puts tensors together and computes nothing, so it makes the same anywhere."""
    op = env.graph.op(env.op(f))
    if effects.gathers(op.type):
        return None
    return f"{op.name!r} ({op.type}) does more than put tensors together"


@condition
def parts_on_host(env: Env, swapped: str, f: str) -> str | None:
    """A copy on the host is known of each part, so that nothing comes back for it."""
    graph, found = env.graph, env.bindings[swapped]
    op = graph.op(env.op(f))
    for part in op.inputs[:-1]:  # the last one is the axis
        if part not in found or graph.producer(found[part]).role not in ("swap_out", "swap_join"):
            return f"{graph.value_name(part)!r} is not on the host"
    return None


def _has_role(env: Env, v: str, role: str) -> str | None:
    op = env.graph.producer(env.value(v))
    return None if op.role == role else f"{op.name!r} is no {role}"


@condition
def waits(env: Env, v: str, anchor: str) -> str | None:
    """An inserted value waits for that anchor now."""
    op = env.graph.producer(env.value(v))
    if env.op(anchor) in op.controls:
        return None
    return f"{op.name!r} does not wait for {env.name(env.op(anchor))}"


@condition
def later(env: Env, new: str, old: str) -> str | None:
    """One operation comes after another."""
    a, b = env.op(old), env.op(new)
    if env.reach.precedes(a, b):
        return None
    return f"{env.name(b)} does not come after {env.name(a)}"


@condition
def forward_uses(env: Env, uses: str) -> str | None:
    """All uses belong to the forward phase."""
    for use in env.uses(uses):
        if not env.forward[use.op]:
            return f"{env.name(use.op)} is no forward operation"
    return None


@condition
def ordered(env: Env, a: str, b: str) -> str | None:
    """The planned order runs the first of two operations before the second, in one frame."""
    first, second = env.op(a), env.op(b)
    if env.graph.op(first).frame or env.graph.op(second).frame:
        return f"{env.name(first)} or {env.name(second)} runs in a loop"
    if not env.guard_of(first) <= env.guard_of(second):
        return f"{env.name(first)} may be dead where {env.name(second)} is alive"
    if env.witness[first] < env.witness[second]:
        return None
    return f"{env.name(first)} is not planned to run before {env.name(second)}"


@condition
def shape_only(env: Env, s: str) -> str | None:
    """The operation looks at nothing but the shape of its inputs, and at the root frame's only."""
    op = env.graph.op(env.op(s))
    if not effects.takes_shape(op.type):
        return f"{op.name!r} ({op.type}) does more than take a shape"
    if op.frame or env.guard[op.id]:
        return f"{op.name!r} runs in a loop or a branch"
    return None


@condition
def still_ordered(env: Env, s: str, readers: str) -> str | None:
    """What an operation waits for, its readers also wait for by another way."""
    graph, source = env.graph, env.op(s)
    wanted = set(graph.op(source).controls)
    lowest = min((env.witness[c] for c in wanted), default=(0, 0))
    for reader in dict.fromkeys(use.op for use in env.uses(readers)):
        missing = set(wanted)
        near = deque([p for p in graph.predecessors(reader) if p != source])
        seen = set(near)
        missing -= seen
        while near and missing:  # a neighbour mostly waits for the same: what is near comes first
            for before in graph.predecessors(near.popleft()):
                if before not in seen and before != source and env.witness[before] >= lowest:
                    seen.add(before)
                    missing.discard(before)
                    near.append(before)
        if missing:
            return f"{env.name(reader)} would no longer wait for {env.name(min(missing))}"
    return None


@condition
def reads(env: Env, op: str, v: str) -> str | None:
    """An operation reads a value."""
    if env.value(v) in env.graph.op(env.op(op)).inputs:
        return None
    return f"{env.name(env.op(op))} does not read {v}"


@condition
def siblings(env: Env, a: str, b: str) -> str | None:
    """Two operations read one value in common, and neither needs the other."""
    first, second = env.op(a), env.op(b)
    inputs = set(env.graph.op(first).inputs) & set(env.graph.op(second).inputs)
    if first == second or not inputs:
        return f"{env.name(first)} and {env.name(second)} read nothing in common"
    if env.reach.precedes(second, first):
        return f"{env.name(first)} needs {env.name(second)}"
    return None


@condition
def together(env: Env, a: str, b: str) -> str | None:
    """Whatever is asked for, a run that needs b needs a as well: nothing is dragged into it."""
    first, second = env.op(a), env.op(b)
    if env.needed(second) & ~env.needed(first):
        return f"some run needs {env.name(second)} and not {env.name(first)}"
    return None


# what rules ensure --------------------------------------------------------------------------------


@condition
def same_type(env: Env, a: str, b: str) -> str | None:
    """Two values have one dtype and shape."""
    first, second = env.graph.value(env.value(a)), env.graph.value(env.value(b))
    if (first.dtype, first.shape) == (second.dtype, second.shape):
        return None
    return f"{a} and {b} differ in type"


@condition
def partitioned(env: Env, v: str, w: str, uses: str) -> str | None:
    """The uses read w, and v keeps none of them."""
    for use in env.uses(uses):
        if env.graph.op(use.op).inputs[use.slot] != env.value(w):
            return f"{env.name(use.op)} does not read {w}"
    return None


@condition
def acyclic(env: Env) -> str | None:
    """Every edge at what was touched agrees with the witness order, so no cycle can close."""
    for op_id in {use.op for use, _ in env.touched}:
        for before in env.graph.predecessors(op_id):
            if env.witness[before] >= env.witness[op_id]:
                return f"{env.name(op_id)} would run before {env.name(before)}, which it needs"
    return None


@condition
def erases(env: Env) -> str | None:
    """Every touched use still reads, through copies and clones, what it read before."""
    for use, before in env.touched:
        now = env.graph.op(use.op).inputs[use.slot]
        if original(env.graph, now) != before:
            return f"slot {use.slot} of {env.name(use.op)} reads something else now"
    return None
