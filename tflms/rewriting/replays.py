"""Conditions of the rules that compute values again; part of the vocabulary of ``conditions``."""

from __future__ import annotations

from tflms.graph.erase import original
from tflms.graph.ir import Graph, OpId
from tflms.rewriting.conditions import VOCABULARY as VOCABULARY
from tflms.rewriting.conditions import Env, condition

_SOON = 200  # operations: so far it is quicker to search anew for each pair


@condition
def unconditional(env: Env, v: str) -> str | None:
    """The operation runs in the root frame and in no branch."""
    op = env.op(v)
    if env.graph.op(op).frame or env.guard_of(op):
        return f"{env.name(op)} runs in a loop or a branch"
    return None


@condition
def backward(env: Env, anchor: str) -> str | None:
    """The loss does not need the operation, so nothing of the forward phase can wait for it."""
    op = env.op(anchor)
    if env.forward[env.source(op)]:
        return f"{env.name(op)} belongs to the forward phase"
    return None


@condition
def shared(env: Env, v: str) -> str | None:
    """At least two operations read the value, so TensorFlow fuses none of them with its maker."""
    if len({use.op for use in env.uses(v) if not env.graph.op(use.op).role}) > 1:
        return None
    return f"{env.name(env.op(v))} may be fused with its only reader"


@condition
def stands_in(env: Env, swapped: str) -> str | None:
    """Each value is to be replaced by a copy of it, or by what was computed again for it."""
    for old, new in env.bindings[swapped].items():
        if original(env.graph, old) != original(env.graph, new):
            return f"{env.graph.value_name(new)!r} does not stand for {env.graph.value_name(old)!r}"
    return None


@condition
def takes_part(env: Env, swapped: str, f: str) -> str | None:
    """The operation reads one of the replaced values; else a clone would equal it."""
    if any(v in env.bindings[swapped] for v in env.graph.op(env.op(f)).inputs):
        return None
    return f"a clone of {env.name(env.op(f))} would be merged with it: it reads the same values"


@condition
def is_recomputed(env: Env, w: str) -> str | None:
    """The value comes from a clone."""
    op = env.graph.producer(env.value(w))
    return None if op.role == "clone" else f"{op.name!r} was not computed again"


@condition
def is_seed(env: Env, s: str) -> str | None:
    """The operation is a seed that we inserted."""
    op = env.graph.op(env.op(s))
    return None if op.role == "seed" else f"{op.name!r} is no seed"


@condition
def same_value(env: Env, w: str, uses: str) -> str | None:
    """All uses read what the value was computed again for, or a copy of it."""
    graph = env.graph
    wanted = original(graph, env.value(w))
    for use in env.uses(uses):
        if original(graph, graph.op(use.op).inputs[use.slot]) != wanted:
            return f"{env.name(use.op)} reads another value there"
    return None


@condition
def behind_seeds(env: Env, w: str, uses: str) -> str | None:
    """Every use comes after all anchors that the value waits for: no cycle, nothing dragged in.

    By the graph's edges, or by the planned order where every run that needs the use needs the
    anchor too, as with two branches of which one is to be done before the other.
    """
    for anchor in sorted({env.source(a) for a in _anchors(env, env.op(w))}):
        if all(_soon_after(env, anchor, use.op) for use in env.uses(uses)):
            continue
        if anchor not in env.behind:  # no edge that a rule moves lies on the way from an anchor
            env.behind[anchor] = _descendants(env.graph, anchor)
        for use in env.uses(uses):
            if use.op in env.behind[anchor]:
                continue
            planned = env.witness[anchor] < env.witness[use.op]
            if not planned or env.needed(use.op) & ~env.needed(anchor):
                return f"{env.name(use.op)} is not behind {env.name(anchor)}"
    return None


def _soon_after(env: Env, anchor: OpId, op: OpId) -> bool:
    """Tell whether an operation that is planned soon after another one has to wait for it."""
    distance = env.witness[op][0] - env.witness[anchor][0]
    return 0 <= distance <= _SOON and env.reach.precedes(anchor, op)


def _anchors(env: Env, op: OpId) -> frozenset[OpId]:
    """What the seeds of a clone wait for."""
    stack = [op]
    while stack:
        here = env.graph.op(stack[-1])
        inserted = [env.graph.value(v).op for v in here.inputs if env.graph.producer(v).role]
        missing = [i for i in inserted if i not in env.seeds]
        if here.id in env.seeds or not missing:
            own = frozenset(here.controls[:1]) if here.role == "seed" else frozenset()
            env.seeds.setdefault(here.id, own.union(*(env.seeds[i] for i in inserted)))
            stack.pop()
        stack += missing
    return env.seeds[op]


def _descendants(graph: Graph, op: OpId) -> frozenset[OpId]:
    stack, found = [op], set[OpId]()
    while stack:
        for after in graph.successors(stack.pop()):
            if after not in found:
                found.add(after)
                stack.append(after)
    return frozenset(found)
