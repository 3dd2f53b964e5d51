"""Knows a Keras model as a graph: layer calls, the tensors between them, the weights they share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import keras

from tflms.errors import GraphError


@dataclass(frozen=True, slots=True)
class Vertex:
    """One call of a layer.

    Attributes:
        name: the layer's name.
        node: the Keras node, which knows the arguments of the call.
        inputs: ids of the tensors that the call reads.
        outputs: ids of the tensors that the call makes.
        parents: indices of the vertices that make the inputs.
        variables: the layer's variables, trainable or not.
    """

    name: str
    node: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    parents: tuple[int, ...]
    variables: tuple[Any, ...]

    @property
    def holds_kernel(self) -> bool:
        """Whether the call multiplies by a trainable matrix or kernel (rank two or more)."""
        return any(v.trainable and len(v.shape) >= 2 for v in self.variables)


@dataclass(frozen=True, slots=True)
class Network:
    """A model read once: its calls in topological order and the tensors between them.

    Attributes:
        model: the model as read (nested models are spread out where their names allow it).
        vertices: the calls; inputs come before their users.
        tensors: the symbolic tensor of each id.
        producer: index of the vertex that makes each tensor; model inputs have none.
        inputs: ids of the model's inputs.
        output: id of the model's output.
    """

    model: Any
    vertices: tuple[Vertex, ...]
    tensors: dict[int, Any]
    producer: dict[int, int]
    inputs: tuple[int, ...]
    output: int

    def ancestors(self, indices: Iterable[int]) -> frozenset[int]:
        """Return the vertices and everything that they are computed from."""
        seen: set[int] = set()
        waiting = list(indices)
        while waiting:
            index = waiting.pop()
            if index not in seen:
                seen.add(index)
                waiting.extend(self.vertices[index].parents)
        return frozenset(seen)

    def crossing(self, before: frozenset[int]) -> tuple[int, ...]:
        """Return the tensors made by (or before) the vertices and read by the others, in order."""
        read_later = {
            tensor
            for index, vertex in enumerate(self.vertices)
            if index not in before
            for tensor in vertex.inputs
        }
        made = [*self.inputs]
        for index, vertex in enumerate(self.vertices):
            if index in before:
                made.extend(vertex.outputs)
        if self.output in made:
            read_later.add(self.output)
        return tuple(tensor for tensor in made if tensor in read_later)

    def tied(self, before: frozenset[int]) -> tuple[str, ...]:
        """Return ``"layer/weight"`` of each variable that vertices on both sides hold."""
        first = {
            id(variable): variable
            for index in sorted(before)
            for variable in self.vertices[index].variables
        }
        names: dict[str, None] = {}
        for index, vertex in enumerate(self.vertices):
            if index not in before:
                for variable in vertex.variables:
                    if id(variable) in first:
                        names[variable.path] = None
        return tuple(names)

    def masked(self, tensors: Iterable[int]) -> tuple[str, ...]:
        """Return the names of the tensors that carry a Keras mask, which no cut can hand on."""
        return tuple(
            self.tensors[tensor].name
            for tensor in tensors
            if getattr(self.tensors[tensor], "_keras_mask", None) is not None
        )


def read_network(model: Any) -> Network:
    """Read a Sequential or functional model.

    Raises:
        GraphError: the model is of another kind, is not built, or has several outputs.
    """
    flat = _spread(model)
    tensors: dict[int, Any] = {}
    producer: dict[int, int] = {}
    vertices: list[Vertex] = []
    indices: dict[int, int] = {}
    inputs = tuple(id(tensor) for tensor in flat.inputs)
    tensors.update({id(tensor): tensor for tensor in flat.inputs})

    for node in _nodes_in_order(flat):
        parents = []
        for tensor in node.input_tensors:
            tensors[id(tensor)] = tensor
            if id(tensor) in producer:
                parents.append(producer[id(tensor)])
        index = len(vertices)
        indices[id(node)] = index
        for tensor in node.outputs:
            tensors[id(tensor)] = tensor
            producer[id(tensor)] = index
        vertices.append(
            Vertex(
                name=node.operation.name,
                node=node,
                inputs=tuple(id(tensor) for tensor in node.input_tensors),
                outputs=tuple(id(tensor) for tensor in node.outputs),
                parents=tuple(dict.fromkeys(parents)),
                variables=tuple(getattr(node.operation, "variables", ())),
            )
        )
    return Network(
        model=flat,
        vertices=tuple(vertices),
        tensors=tensors,
        producer=producer,
        inputs=inputs,
        output=id(flat.outputs[0]),
    )


def _nodes_in_order(model: Any) -> list[Any]:
    """Return the nodes between inputs and output, each after the nodes that it reads from."""
    stop = {id(tensor) for tensor in model.inputs}
    done: set[int] = set()
    order: list[Any] = []
    waiting = [(model.outputs[0], False)]
    while waiting:
        tensor, children_done = waiting.pop()
        if id(tensor) in stop:
            continue
        history = tensor._keras_history
        node = history.operation._inbound_nodes[history.node_index]
        if id(node) in done:
            continue
        if children_done:
            done.add(id(node))
            order.append(node)
        else:
            waiting.append((tensor, True))
            waiting.extend((source, False) for source in reversed(node.input_tensors))
    return order


def _check_kind(model: Any) -> None:
    if isinstance(model, keras.Sequential) and not model.built:
        raise GraphError(
            f"model {model.name!r} is not built, so its tensors are unknown; "
            "begin it with keras.Input(shape) or call it once"
        )
    if not getattr(model, "inputs", None) or not getattr(model, "outputs", None):
        raise GraphError(
            f"model {model.name!r} is a {type(model).__name__} without a layer graph; "
            "split() needs a keras.Sequential or a functional keras.Model"
        )
    if len(model.outputs) != 1:
        raise GraphError(
            f"model {model.name!r} has {len(model.outputs)} outputs; local updates put one loss "
            "behind each chunk and need a model with a single output"
        )


def _is_nested(operation: Any) -> bool:
    return isinstance(operation, keras.Model) and bool(getattr(operation, "inputs", None))


def _spread(model: Any) -> Any:
    """Return a model whose nested models are replaced by their layers (weights are shared)."""
    _check_kind(model)
    nodes = _nodes_in_order(model)
    if not any(_is_nested(node.operation) for node in nodes):
        return model
    names = [name for node in nodes for name in _names_inside(node.operation)]
    if len(names) != len(set(names)):
        return model  # Keras wants unique names in one graph: the nested model stays one layer
    inputs = [
        keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype, name=f"{tensor.name}_spread")
        for tensor in model.inputs
    ]
    output = _replay(model, inputs)
    return keras.Model(inputs, output, name=model.name)


def _names_inside(operation: Any) -> list[str]:
    if not _is_nested(operation):
        return [operation.name]
    return [name for node in _nodes_in_order(operation) for name in _names_inside(node.operation)]


def _replay(model: Any, inputs: list[Any]) -> Any:
    """Call the model's layers again on other symbolic inputs, nested models layer by layer."""
    known = {id(old): new for old, new in zip(model.inputs, inputs, strict=True)}
    for node in _nodes_in_order(model):
        args, kwargs = node.arguments.fill_in(known)
        if _is_nested(node.operation):
            results = [_replay(node.operation, keras.tree.flatten(args[0]))]
        else:
            results = keras.tree.flatten(node.operation(*args, **kwargs))
        known.update({id(old): new for old, new in zip(node.outputs, results, strict=True)})
    return known[id(model.outputs[0])]
