"""Training steps written as text, and the rewrite of one by a strategy, without TensorFlow."""

from __future__ import annotations

from dataclasses import dataclass

from tflms.config import Config
from tflms.graph import erase, order, text
from tflms.graph.ir import Graph
from tflms.graph.order import Phases
from tflms.graph.verify import verify
from tflms.rewriting.engine import Engine
from tflms.strategies import shapes, siblings, swap, waiting


@dataclass(frozen=True)
class Outcome:
    """A rewritten step."""

    graph: Graph
    before: str
    phases: Phases
    engine: Engine
    swapped: list[swap.Swapped]

    @property
    def after(self) -> str:
        return text.dump(self.graph)

    def names(self) -> list[str]:
        """The swapped values, in the order in which they were taken."""
        return [self.graph.value_name(s.value) for s in self.swapped]

    def anchors(self, value: str) -> dict[str, str]:
        """For each reader of a swapped value, the anchor of what it reads now."""
        found = {}
        for one in self.swapped:
            if self.graph.value_name(one.value) == value:
                for swap_in, uses in one.groups:
                    (anchor,) = self.graph.op(swap_in).controls
                    for use in uses:
                        found[self.graph.op(use.op).name] = self.graph.op(anchor).name
        return found

    def level(self, name: str) -> int:
        return self.phases.level[text.op_named(self.graph, name)]


def rewrite(
    source, config=None, *, loss="loss", targets=("train",), default_kind="CPU", **settings
) -> Outcome:
    """Run all that a call of ``tflms.rewrite`` runs between reading and handing back."""
    config = Config(**{"min_swap_bytes": 0, **settings}) if config is None else config
    graph = text.parse(source)
    edges = erase.edges(graph)
    phases = order.phases(
        graph,
        loss=None if loss is None else text.value_named(graph, loss),
        targets=[text.op_named(graph, name) for name in targets],
    )
    pairs = siblings.pairs(graph, phases)
    agreed = order.with_edges(graph, phases.order, pairs)
    engine = Engine(graph, phases, order=agreed)
    shapes.run(engine)
    swapped = swap.run(engine, config, default_kind=default_kind)
    siblings.run(engine, swapped, pairs if agreed is not None else [])
    waiting.run(engine, swapped)
    verify(graph)
    erase.check(graph, edges)
    return Outcome(graph, text.dump(text.parse(source)), phases, engine, swapped)


def chain(layers: int, *, activation: str = "Tanh", scope: str = "") -> str:
    """A chain of products and activations with its gradients: one operation a level.

    Layer i makes ``a{i}`` and ``h{i}``; ``da{i}`` is the gradient of ``a{i}``, ``dh{i}`` of
    ``h{i}``, ``dw{i}`` of the weights.
    """
    lines = ["x = Placeholder() : f32[64,8]", "one = Const() : f32[]"]
    below = "x"
    for i in range(1, layers + 1):
        lines += [
            f"{scope}w{i} = VarHandleOp() : resource[] stateful",
            f"{scope}r{i} = ReadVariableOp({scope}w{i}) : f32[8,8]",
            f"{scope}a{i} = MatMul({below}, {scope}r{i}) : f32[64,8]",
            f"{scope}h{i} = {activation}({scope}a{i}) : f32[64,8]",
        ]
        below = f"{scope}h{i}"
    lines += [
        f"loss = Sum({below}) : f32[]",
        f"{scope}dh{layers} = Fill(one, loss) : f32[64,8]",
    ]
    updates = []
    for i in range(layers, 0, -1):
        below = f"{scope}h{i - 1}" if i > 1 else "x"
        lines += [
            f"{scope}da{i} = {activation}Grad({scope}h{i}, {scope}dh{i}) : f32[64,8]",
            f"{scope}dw{i} = MatMul({below}, {scope}da{i}) : f32[8,8]",
            f"{scope}u{i} = AssignSubVariableOp({scope}w{i}, {scope}dw{i}) stateful",
        ]
        if i > 1:
            lines.append(f"{scope}dh{i - 1} = MatMul({scope}da{i}, {scope}r{i}) : f32[64,8]")
        updates.append(f"{scope}u{i}")
    lines.append(f"train = NoOp() after {', '.join(updates)}")
    return "\n".join(lines) + "\n"
