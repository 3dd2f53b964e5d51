"""Knows the result of a split: the chunks, the cuts between them, and what each of them costs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from tflms.units import format_bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """The tensors that cross from one chunk to the next.

    Attributes:
        tensors: the tensors' names.
        shapes: their shapes, an unknown batch size is None.
        dtypes: their dtypes.
        nbytes: bytes of all of them for one batch of the plan's batch size.
    """

    tensors: tuple[str, ...]
    shapes: tuple[tuple[int | None, ...], ...]
    dtypes: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of layers that trains on one device.

    Attributes:
        index: position in the network, counted from 0.
        layers: names of the layer calls in order.
        parameters: number of trainable values.
        parameter_bytes: their bytes.
        activation_bytes: bytes kept for the backward pass, one batch of the plan's batch size.
        flops: forward FLOPs of contractions for one batch.
    """

    index: int
    layers: tuple[str, ...]
    parameters: int
    parameter_bytes: int
    activation_bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class ChunkNet:
    """The runnable side of a chunk: a Keras model on the original layers and how tensors pass it.

    Attributes:
        model: from the tensors that come in to those that the chunk makes; weights are shared with
            the model that was split.
        routes: for each tensor that leaves, ``("in", i)`` where it only passes, or ``("out", i)``.
    """

    model: Any
    routes: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Where a model is cut, and the predicted cost of each chunk.

    Attributes:
        chunks: the chunks in order.
        cuts: the cuts between them, one fewer.
        batch_size: batch size that all bytes and FLOPs are for.
        input_bytes: bytes of one batch of the model's inputs.
        model: the model that was split.
        nets: the runnable chunks.
    """

    chunks: tuple[Chunk, ...]
    cuts: tuple[Cut, ...]
    batch_size: int
    input_bytes: int
    model: Any = field(repr=False, compare=False)
    nets: tuple[ChunkNet, ...] = field(repr=False, compare=False)

    def memory(
        self,
        index: int,
        *,
        batch_size: int | None = None,
        queue_size: int = 0,
        slots: int = 2,
        head_bytes: int = 0,
        label_bytes: int = 0,
    ) -> int:
        """Return the bytes that a device needs to train one chunk.

        Weights with their optimizer slots, gradients, kept activations, the head, and the queue of
        ``queue_size`` waiting batches plus the two that are being sent and used.

        Args:
            index: the chunk.
            batch_size: examples in a batch; default: the plan's.
            queue_size: capacity of the queue in front of the chunk; 0 in the fused runtime.
            slots: optimizer values per weight (Adam 2, momentum 1, plain descent 0).
            head_bytes: parameters, slots and activations of the auxiliary head.
            label_bytes: bytes of one batch of labels that wait beside the activations.
        """
        chunk = self.chunks[index]
        scale = (batch_size or self.batch_size) / self.batch_size
        incoming = self.input_bytes if index == 0 else self.cuts[index - 1].nbytes
        weights = chunk.parameter_bytes * (2 + slots)
        held = (incoming + label_bytes) * (queue_size + 2)
        return int(weights + (chunk.activation_bytes + held) * scale + head_bytes)

    def digest(self) -> str:
        """Return a short hash of layers and cuts; two processes with one plan have one digest."""
        facts = [
            [chunk.layers for chunk in self.chunks],
            [[cut.shapes, cut.dtypes] for cut in self.cuts],
            [chunk.parameters for chunk in self.chunks],
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        """Return the plan as a table: parameters, activations, FLOPs, bytes per cut, memory."""
        head = (
            f"{len(self.chunks)} chunks of {self.model.name!r}, "
            f"batch {self.batch_size} (memory with Adam, queue of 2)"
        )
        rows = [
            ("chunk", "layers", "parameters", "activations", "MFLOP", "cut behind it", "memory")
        ]
        for chunk in self.chunks:
            cut = self.cuts[chunk.index] if chunk.index < len(self.cuts) else None
            layers = chunk.layers[0] if chunk.layers else "-"
            if len(chunk.layers) > 1:
                layers += f" .. {chunk.layers[-1]} ({len(chunk.layers)})"
            crossing = "-"
            if cut is not None:
                names = [
                    f"{name}{list(shape[1:])}"
                    for name, shape in zip(cut.tensors, cut.shapes, strict=True)
                ]
                crossing = f"{' + '.join(names)}: {format_bytes(cut.nbytes)}"
            rows.append(
                (
                    str(chunk.index),
                    layers,
                    f"{chunk.parameters:,}",
                    format_bytes(chunk.activation_bytes),
                    f"{chunk.flops / 1e6:,.1f}",
                    crossing,
                    format_bytes(self.memory(chunk.index, queue_size=2)),
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([head, *lines])
