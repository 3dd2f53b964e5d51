"""Chooses which values to swap and for which of their uses, and proposes the rules for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tflms.config import Config
from tflms.errors import ConfigError
from tflms.graph import effects, liveness
from tflms.graph.ir import Graph, OpId, Use, ValueId
from tflms.graph.order import Phases
from tflms.planning import kernels
from tflms.planning.cost import device_kind
from tflms.rewriting.engine import Application, Applied, Engine
from tflms.strategies.anchors import BY_NAME, Search

LEVELS_WITHOUT_GAIN = 1  # an anchor this near behind the last early use would free nothing


@dataclass(frozen=True, slots=True)
class Swapped:
    """A value that was parked: its uses by swap-in, and the levels between which it is away."""

    value: ValueId
    swap_out: OpId
    groups: tuple[tuple[OpId, tuple[Use, ...]], ...]  # swap-in and what reads it
    gone: int
    back: int


@dataclass(frozen=True, slots=True)
class _Candidate:
    value: ValueId
    uses: tuple[tuple[Use, OpId], ...]  # what is swapped for, with its anchor
    gone: int  # level of the last use that keeps the value
    reuse: int  # levels until the first use after that


def run(engine: Engine, config: Config, *, default_kind: str = "CPU") -> list[Swapped]:
    """Propose swaps by the paper's strategies and return those that were applied.

    Values are taken by distance of their reuse, farthest first, then by size, then by id, until
    ``n_tensors`` are swapped (arXiv 1807.02037, section 5; ties made deterministic).

    Args:
        engine: applies the rules.
        config: what to swap, and how.
        default_kind: the kind of device that runs operations which name none.
    """
    graph, phases = engine.graph, engine.phases
    search = Search(graph, phases, engine.reach, config.lb, config.ub)
    wanted = selection(graph, config)
    read = liveness.read(graph, phases)
    candidates = [
        candidate
        for op in phases.order
        if phases.step[op] and phases.forward[op]
        for value in graph.op(op).outputs
        if value in wanted and (candidate := _candidate(search, config, value, read, default_kind))
    ]
    unknown = config.batch_size or 1
    candidates.sort(key=lambda c: (-c.reuse, -(graph.value(c.value).nbytes(unknown) or 0), c.value))
    done: list[Swapped] = []
    for candidate in candidates:
        if 0 <= config.n_tensors <= len(done):
            break
        swapped = _swap(engine, config, candidate)
        if swapped is not None:
            done.append(swapped)
    return done


def selection(graph: Graph, config: Config) -> set[ValueId]:
    """Return the values that the filters, the size and the effects table admit.

    Scopes match whole components of a name; exclusion wins.

    Raises:
        ConfigError: a scope or type that is to be included or excluded does not occur.
    """
    for key in ("incl_scopes", "excl_scopes", "optimizer_scopes"):
        for scope in getattr(config, key) or ():
            if not any(in_scope(op.name, scope) for op in graph.ops()):
                raise ConfigError(f"{key}: no operation lies in the scope {scope!r}")
    types = {op.type for op in graph.ops()}
    for key in ("incl_types", "excl_types"):
        for name in getattr(config, key):
            if name not in types:
                raise ConfigError(f"{key}: no operation of type {name!r} is in the graph")
    including = bool(config.incl_scopes or config.incl_types)
    found: set[ValueId] = set()
    unknown = config.batch_size
    for op in graph.ops():
        if op.type in config.excl_types or _in_any(op.name, config.excl_scopes):
            continue
        if including and not (op.type in config.incl_types or _in_any(op.name, config.incl_scopes)):
            continue
        facts = effects.of(op.type)
        if not facts.movable or op.stateful or op.frame or op.role:
            continue
        if effects.vanishes(op.type, graph.reader_types(op.id)):
            continue
        for value in op.outputs:
            v = graph.value(value)
            if not v.is_tensor or (v.dtype in ("i32", "bool") and v.shape in (None, ())):
                continue
            known = unknown is not None or _static(v.shape)
            nbytes = v.nbytes(unknown or 1) if known else None
            if nbytes is None or nbytes >= int(config.min_swap_bytes):
                found.add(value)
    return found


def _static(shape: tuple[int | None, ...] | None) -> bool:
    return shape is not None and None not in shape


def in_scope(name: str, scope: str) -> bool:
    """Tell whether a name lies in a scope, by whole components: ``conv1`` does not hold conv10."""
    scope = scope.rstrip("/")
    return name == scope or name.startswith(scope + "/")


def _in_any(name: str, scopes: tuple[str, ...]) -> bool:
    return any(in_scope(name, scope) for scope in scopes)


def _candidate(
    search: Search, config: Config, value: ValueId, read: Sequence[bool], default_kind: str
) -> _Candidate | None:
    graph, phases = search.graph, search.phases
    if not phases.activation[value]:
        return None
    level = phases.level
    born = level[graph.value(value).op]
    uses = [u for u in graph.uses(value) if _counts(graph, phases, u) and read[u.op]]
    uses.sort(key=lambda u: (level[u.op], u))
    find = BY_NAME[str(config.strategy)]
    gone, first = born, 0
    for at, use in enumerate(uses):  # forward uses keep the value, unless they are far branches
        far = config.swap_branches and level[use.op] - born > config.branch_threshold
        if not phases.late(use.op) and not (far and phases.forward[use.op]):
            gone, first = level[use.op], at + 1
    anchors: list[OpId] = []
    at = first
    while at < len(uses):  # a use without an anchor keeps the value, and all uses before it too
        anchor = None
        if not paired(graph, uses[at], default_kind):
            anchor = find(search, value, uses[at].op, gone + LEVELS_WITHOUT_GAIN - 1)
        at += 1
        if anchor is None:
            gone, first, anchors = level[uses[at - 1].op], at, []
        else:
            anchors.append(anchor)
    if not anchors:
        return None
    served = tuple(zip(uses[first:], anchors, strict=True))
    return _Candidate(value, served, gone, level[uses[first].op] - gone)


def paired(graph: Graph, use: Use, default_kind: str) -> bool:
    """Tell whether a kernel would be another one if its input came from a copy."""
    if kernels.takes_in_constants(graph, use.op):
        return True
    op = graph.op(use.op)
    maker = graph.producer(op.inputs[use.slot])
    kind = device_kind(maker.device, default_kind)
    return kind == "CPU" and effects.paired(maker.type, op.type, use.slot)


def _counts(graph: Graph, phases: Phases, use: Use) -> bool:
    """Whether a use keeps its value: not of an early clone, nor of what nothing needs any more."""
    if use.op >= graph.original_ops or not phases.step[use.op]:
        return False
    op = graph.op(use.op)
    if not effects.takes_shape(op.type) or graph.control_users(use.op):
        return True
    return any(graph.uses(v) for v in op.outputs)


def _swap(engine: Engine, config: Config, candidate: _Candidate) -> Swapped | None:
    """Swap for each use, let the value travel out once, and fuse swap-ins that are near."""
    graph, phases = engine.graph, engine.phases
    groups: list[tuple[OpId, list[Use]]] = []
    out: ValueId | None = None
    mark = len(graph.journal)
    by_op: dict[OpId, list[Use]] = {}
    anchor_of = {}
    for use, anchor in candidate.uses:
        by_op.setdefault(use.op, []).append(use)
        anchor_of[use.op] = anchor
    for op, uses in by_op.items():
        rule, name = ("swap_branch", "far") if phases.forward[op] else ("swap", "late")
        outcome = engine.apply(
            Application(rule, {"v": candidate.value, name: tuple(uses), "anchor": anchor_of[op]})
        )
        if not isinstance(outcome, Applied):
            graph.rollback(mark)  # a use left behind would keep the value: all or nothing
            return None
        h = graph.op(OpId(outcome.made["h"])).outputs[0]
        w = OpId(outcome.made["w"])
        if out is None:
            out = h
        else:
            engine.apply(Application("fuse_swap_outs", {"h1": out, "h2": h}))
        if groups and config.fuse_swapins and _near(config, phases, groups[-1][1], op):
            fused = engine.apply(
                Application(
                    "fuse_swap_ins",
                    {
                        "w1": graph.op(groups[-1][0]).outputs[0],
                        "w2": graph.op(w).outputs[0],
                        "late2": tuple(uses),
                    },
                )
            )
            if isinstance(fused, Applied):
                groups[-1][1].extend(uses)
                continue
        groups.append((w, list(uses)))
    assert out is not None
    back = min(phases.level[graph.op(w).controls[0]] for w, _ in groups)
    return Swapped(
        candidate.value,
        graph.value(out).op,
        tuple((w, tuple(uses)) for w, uses in groups),
        candidate.gone,
        back,
    )


AUTOMATIC_FUSE_LEVELS = 24  # a few layers of a backward pass: less than a swap-in's own lead


def _near(config: Config, phases: Phases, group: list[Use], op: OpId) -> bool:
    distance = AUTOMATIC_FUSE_LEVELS if config.fuse_distance is None else config.fuse_distance
    return phases.level[op] - phases.level[group[-1].op] <= distance
