"""What must hold of a rewritten step, told from its text alone: no code of the package is asked."""

from __future__ import annotations

import hashlib
import re

import networkx as nx

PURE = {
    *("Tanh", "Relu", "Sigmoid", "Softmax", "Exp", "Identity", "Reshape", "MaxPool", "Mul"),
    *("AddV2", "AddN", "MatMul", "ConcatV2", "Sub", "Split", "Fill", "Sum", "Shape"),
    *("StridedSliceGrad", "TanhGrad", "ReluGrad", "MaxPoolGrad"),
}
_LINE = re.compile(r"(\S+) = (\w+)\(([^()]*)\)(.*)")


class Text:
    """The lines of a graph, taken apart."""

    def __init__(self, source: str) -> None:
        self.type: dict[str, str] = {}
        self.inputs: dict[str, list[str]] = {}
        self.controls: dict[str, list[str]] = {}
        self.role: dict[str, str] = {}
        self.origin: dict[str, str] = {}
        for line in source.splitlines():
            if not line.strip():
                continue
            name, kind, inputs, rest = _LINE.fullmatch(line.strip()).groups()
            words = rest.replace(",", " ").split()
            self.type[name] = kind
            self.inputs[name] = [i.strip() for i in inputs.split(",") if i.strip()]
            self.controls[name] = []
            for i, word in enumerate(words):
                if word == "role":
                    self.role[name] = words[i + 1]
                elif word == "origin":
                    self.origin[name] = words[i + 1]
                elif word == "after":
                    for other in words[i + 1 :]:
                        if other in ("frame", "colocated", "stateful", "role", "entering"):
                            break
                        self.controls[name].append(other)

    def maker(self, value: str) -> str:
        """The operation of a value; names of operations hold no colon."""
        return value.split(":")[0]

    def before(self, name: str) -> list[str]:
        return [self.maker(v) for v in self.inputs[name]] + self.controls[name]

    def digraph(self) -> nx.DiGraph:
        found = nx.DiGraph()
        found.add_nodes_from(self.type)
        found.add_edges_from((b, name) for name in self.type for b in self.before(name))
        return found

    def root(self, value: str) -> str:
        """The user's value behind copies and clones."""
        name = self.maker(value)
        if name in self.origin:
            return value.replace(name, self.origin[name], 1)
        if name in self.role:
            return self.root(self.inputs[name][0])
        return value

    def levels(self, targets) -> dict[str, int]:
        """Longest way from a source, among what the targets need, by repeated relaxation."""
        view = self.digraph()
        wanted = set(targets).union(*(nx.ancestors(view, t) for t in targets))
        part = view.subgraph(wanted)
        found: dict[str, int] = {}
        for generation, names in enumerate(nx.topological_generations(part)):
            found |= dict.fromkeys(names, generation)
        return found

    def meaning(self) -> dict[str, str]:
        """What each operation computes: a digest of its type and of what its inputs compute."""
        found: dict[str, str] = {}
        for name in nx.topological_sort(self.digraph()):
            inputs = [self._value(found, v) for v in self.inputs[name]]
            if self.role.get(name) in ("swap_out", "swap_in", "identity", "seed"):
                found[name] = inputs[0]
                continue
            itself = "" if self.inputs[name] else name
            stateful = name if self.type[name] in ("RandomUniform",) else ""
            text = "|".join([self.type[name], itself, stateful, *inputs])
            found[name] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return found

    def _value(self, found: dict[str, str], value: str) -> str:
        name, _, slot = value.partition(":")
        if self.role.get(name, "clone") != "clone":
            return found[name]  # a copy's only output is its input
        return f"{found[name]}:{slot or 0}"

    def alive(self, taken: bool) -> dict[str, bool]:
        """Which operations are alive when the predicate ``p`` holds or not, by dead tokens."""
        found: dict[str, bool] = {}
        for name in nx.topological_sort(self.digraph()):
            inputs = [self._token(found, v, taken) for v in self.inputs[name]]
            controls = [found[c] for c in self.controls[name]]
            if self.type[name] == "Merge":
                found[name] = any(inputs) and all(controls)
            else:
                found[name] = all(inputs) and all(controls)
        return found

    def _token(self, found: dict[str, bool], value: str, taken: bool) -> bool:
        name, _, slot = value.partition(":")
        if self.type[name] != "Switch":
            return found[name]
        return found[name] and taken == (slot == "1")

    def runs(self, targets) -> set[str]:
        """What a run of these targets executes."""
        view = self.digraph()
        return set(targets).union(*(nx.ancestors(view, t) for t in targets))

    def read_by_an_effect(self, targets) -> set[str]:
        """What is read, by way of data alone, by what has an effect or is asked for.

        TensorFlow drops the rest, which others at most wait for.
        """
        data = nx.DiGraph()
        data.add_nodes_from(self.type)
        data.add_edges_from((self.maker(v), name) for name in self.type for v in self.inputs[name])
        ends = {name for name in self.runs(targets) if self.type[name] not in PURE} | set(targets)
        return ends.union(*(nx.ancestors(data, end) for end in ends))

    def shapes(self) -> set[str]:
        return {name for name, kind in self.type.items() if kind == "Shape"}
