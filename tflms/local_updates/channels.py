"""Bounded queues between chunks: tensors with a header, put and taken inside or outside a graph.

They are TensorFlow's own queues, so a full one blocks its producer (real back-pressure), closing
one wakes whoever waits, and a wait inside a graph occupies no thread of the pool.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True, slots=True)
class Message:
    """What travels: a batch (``kind`` "train") or a token ("reset", "epoch", "save", "close").

    Tokens travel in the same queues as the batches, so every chunk meets them at one batch index.

    Attributes:
        facts: the header: ``kind``, ``batch`` and what else the kind needs.
        tensors: the tensors that cross the cut, then labels, then example weights if any.
        nbytes: bytes of header and tensors as they travelled.
    """

    facts: dict[str, Any]
    tensors: list[Any]
    nbytes: int = 0


class Channel:
    """A bounded first-in first-out queue of headers and tensors.

    Args:
        capacity: messages that may wait.
        dtypes: dtypes of the tensors; None packs any tensors into strings, as the wire needs them.
    """

    def __init__(self, capacity: int, dtypes: Sequence[Any] | None = None) -> None:
        self.dtypes = None if dtypes is None else [tf.as_dtype(dtype) for dtype in dtypes]
        payload = [tf.string, tf.string] if self.dtypes is None else self.dtypes
        with tf.init_scope(), tf.device("/cpu:0"):
            self.queue = tf.queue.FIFOQueue(capacity, [tf.string, *payload])

    def put(self, header: Any, tensors: Sequence[Any]) -> None:
        """Append a message, in a graph or at once; blocks while the queue is full."""
        payload = pack(tensors) if self.dtypes is None else list(tensors)
        self.queue.enqueue([header, *payload])

    def put_token(self, facts: dict[str, Any]) -> None:
        """Append a token: a header with empty tensors."""
        empty = [tf.zeros([0], dtype) for dtype in self.dtypes or []]
        self.put(tf.constant(json.dumps(facts)), empty)

    def take(self) -> Message:
        """Remove the oldest message, waiting for one; outside graphs."""
        header, *payload = self.queue.dequeue()
        facts = json.loads(header.numpy())
        if self.dtypes is not None:
            nbytes = sum(int(tf.size(t)) * t.dtype.size for t in payload)
            return Message(facts, payload, nbytes + len(header.numpy()))
        return Message(facts, unpack(payload), len(header.numpy()) + packed_bytes(payload))

    def take_like(self, like: Sequence[Any]) -> list[Any]:
        """Remove the oldest message inside a graph; its tensors look like the given ones."""
        _, *payload = self.queue.dequeue()
        found = payload
        if self.dtypes is None:
            first, rest = payload
            start = tf.size(rest) - len(like) + 1  # the others are the last ones of the rest
            whole = tf.equal(tf.strings.length(first), 0)
            first = tf.cond(whole, lambda: rest[1], lambda: first)
            parts = [first, *[rest[start + index] for index in range(len(like) - 1)]]
            found = [
                tf.io.parse_tensor(part, tensor.dtype)
                for part, tensor in zip(parts, like, strict=True)
            ]
        for tensor, model in zip(found, like, strict=True):
            tensor.set_shape(model.shape)
        return found

    def size(self) -> int:
        """Return how many messages wait."""
        return int(self.queue.size())

    def close(self) -> None:
        """Wake everyone who waits; what follows raises."""
        self.queue.close(cancel_pending_enqueues=True)


def pack(tensors: Sequence[Any]) -> list[Any]:
    """Return tensors as two tensors of strings: the first one's bytes; dtypes, the others' bytes.

    The first one is the large one, and putting a string into a vector copies it.
    """
    names = ",".join(tensor.dtype.name for tensor in tensors)
    first, *others = [tf.io.serialize_tensor(tensor) for tensor in tensors] or [tf.constant("")]
    return [first, tf.stack([tf.constant(names), *others])]


def unpack(packed: Sequence[Any]) -> list[Any]:
    """Return the tensors of ``pack``, bit for bit; the wire may put the first among the others."""
    first, rest = packed
    names, *parts = tf.unstack(rest)
    listed = names.numpy().decode()
    dtypes = listed.split(",") if listed else []
    if len(parts) < len(dtypes):
        parts = [first, *parts]
    return [
        tf.io.parse_tensor(part, tf.as_dtype(dtype))
        for dtype, part in zip(dtypes, parts, strict=True)
    ]


def packed_bytes(packed: Sequence[Any]) -> int:
    """Return the bytes of packed tensors."""
    return sum(int(tf.reduce_sum(tf.strings.length(part))) for part in packed)
