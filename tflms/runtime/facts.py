"""Says of any operation or value why it was kept on the device; made on demand, name by name."""

from __future__ import annotations

from tflms.config import Config
from tflms.graph import effects
from tflms.graph.ir import Graph, ValueId
from tflms.graph.order import Phases
from tflms.strategies import swap


class Facts(dict[str, str]):
    """Why things were kept, by the name of an operation or of a value (``op:slot``)."""

    def __init__(self, graph: Graph, phases: Phases, config: Config) -> None:
        super().__init__()
        self._graph, self._phases, self._config = graph, phases, config

    def __contains__(self, name: object) -> bool:
        return self._graph.find(str(name)) is not None or self._value(str(name)) is not None

    def _value(self, name: str) -> ValueId | None:
        return self._graph.find_value(name)

    def __getitem__(self, name: str) -> str:
        graph, phases = self._graph, self._phases
        value, found = self._value(name), graph.find(name)
        op = graph.op(found) if found is not None else None
        if op is None:
            if value is None:
                raise KeyError(name)
            op = graph.producer(value)
        outputs = op.outputs if found is not None or value is None else [value]
        facts = effects.of(op.type)
        if op.role:
            return f"it was inserted as {op.role}"
        if op.id >= len(phases.step) or not phases.step[op.id]:
            return "the training step does not run it"
        if not facts.known:
            return f"the op type {op.type} is unknown, and what is unknown is left alone"
        if not facts.movable:
            return f"results of {op.type} stay on the device"
        if not any(phases.activation[v] for v in outputs):
            return "it is computed from variables alone, so it is no activation"
        readers = [use.op for v in outputs for use in graph.uses(v)]
        if not any(r < len(phases.step) and phases.late(r) for r in readers):
            return "nothing behind the forward phase reads it"
        admitted = swap.selection(graph, self._config)
        if not any(v in admitted for v in outputs):
            return "it is smaller than min_swap_bytes, or a filter leaves it out"
        return "no late use has an anchor far enough behind the last early use"
