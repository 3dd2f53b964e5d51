"""The ends of the wire: a server that guards this process's queues, and clients to other processes.

Messages go over TensorFlow's own gRPC engine. A push returns when the message is in the receiver's
bounded queue, so a slow receiver holds its sender back. The server listens on its given address
alone, and every call must carry the run's secret.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import tensorflow as tf

from tflms.local_updates.channels import Channel
from tflms.local_updates.cluster import Cluster
from tflms.local_updates.failure import ChunkError

_TAKEN, _STRANGER = 1, 0
_PROBE_SECONDS = 1.0
_PIECE_BYTES = 2**21  # gRPC refuses calls over 4 MiB; header and frame need room too


def is_open(address: str) -> bool:
    """Whether something listens at an address."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_SECONDS).close()
    except OSError:
        return False
    return True


class Gate:
    """This process's server: each named channel can be pushed into by those who know the secret.

    Args:
        cluster: who we are and where we listen.
        channels: the packed channels by name.
    """

    def __init__(self, cluster: Cluster, channels: dict[str, Channel]) -> None:
        address = cluster.addresses[cluster.index]
        if is_open(address):
            raise ChunkError(
                f"another program listens at {address}; is this chunk started twice?",
                chunk=cluster.index,
                batch=None,
            )
        self._server = tf.distribute.experimental.rpc.Server.create("grpc", address)
        self._kept: list[Any] = []  # the server does not keep its functions alive
        for name, channel in sorted(channels.items()):
            for sender in range(len(cluster.addresses)):
                if sender != cluster.index:
                    entry = _Entry(cluster.secret, channel)
                    self._kept.append(entry)
                    self._server.register(f"{name}_{sender}", entry.push)
        self._server.start()


class _Entry:
    """Takes one sender's messages for one channel; large ones come in pieces."""

    def __init__(self, secret: str, channel: Channel) -> None:
        with tf.init_scope(), tf.device("/cpu:0"):
            pieces = tf.Variable(tf.zeros([0], tf.string), shape=[None], trainable=False)
            segments = tf.Variable(tf.zeros([0], tf.int32), shape=[None], trainable=False)
        self._held = (pieces, segments)
        expected = tf.constant(secret)

        @tf.function(
            autograph=False,
            input_signature=[
                tf.TensorSpec((), tf.string),
                tf.TensorSpec((), tf.string),
                tf.TensorSpec((None,), tf.string),
                tf.TensorSpec((None,), tf.int32),
                tf.TensorSpec((), tf.int32),
            ],
        )
        def push(given: Any, header: Any, more: Any, places: Any, count: Any) -> Any:
            def complete() -> Any:
                payload = tf.strings.unsorted_segment_join(pieces, segments, count)
                with tf.control_dependencies([payload]):
                    pieces.assign(tf.zeros([0], tf.string))
                    segments.assign(tf.zeros([0], tf.int32))
                channel.queue.enqueue([header, payload])
                return tf.constant(_TAKEN)

            def take() -> Any:
                pieces.assign(tf.concat([pieces, more], 0))
                segments.assign(tf.concat([segments, places], 0))
                return tf.cond(count > 0, complete, lambda: tf.constant(_TAKEN))

            return tf.cond(tf.equal(given, expected), take, lambda: tf.constant(_STRANGER))

        self.push = push


def in_pieces(payload: list[bytes]) -> list[list[tuple[int, bytes]]]:
    """Return groups of (position, piece) that each fit into one call of gRPC (4 MiB at most)."""
    groups: list[list[tuple[int, bytes]]] = [[]]
    room = _PIECE_BYTES
    for position, part in enumerate(payload):
        start = 0
        while start < len(part) or start == 0:
            if room == 0:
                groups.append([])
                room = _PIECE_BYTES
            piece = part[start : start + room]
            groups[-1].append((position, piece))
            room -= len(piece)
            start += max(len(piece), 1)
    return groups


class Peer:
    """A client to another chunk's process.

    Args:
        cluster: the run's processes.
        index: the chunk to talk to.
        timeout: seconds that one call may take.

    Attributes:
        bytes_out: bytes of headers and payloads that the peer has taken.
    """

    def __init__(self, cluster: Cluster, index: int, *, timeout: float) -> None:
        self.index = index
        self.address = cluster.addresses[index]
        self.bytes_out = 0
        self._cluster = cluster
        self._timeout = timeout
        self._lock = threading.Lock()
        self._client: Any = None

    def connect(self) -> None:
        """Wait until the peer listens, then connect.

        Raises:
            ChunkError: it does not listen within the timeout.
        """
        limit = time.monotonic() + self._timeout
        # A client made for a closed port hangs inside TensorFlow: look first.
        while not is_open(self.address):
            if time.monotonic() > limit:
                raise ChunkError(
                    f"nothing listens at {self.address} after {self._timeout:g} s; start that "
                    "chunk's process, or correct its address",
                    chunk=self.index,
                    batch=None,
                )
            time.sleep(0.1)
        self._client = tf.distribute.experimental.rpc.Client.create(
            "grpc",
            address=self.address,
            name=f"to_chunk_{self.index}",
            timeout_in_ms=int(self._timeout * 1000),
        )

    def push(self, channel: str, header: Any, payload: Any) -> None:
        """Append a message to one of the peer's channels; waits while it is full.

        Raises:
            ConnectionError: the peer refused the message, is gone, or did not take it in time.
        """
        parts = list(payload.numpy())
        call = getattr(self._client, f"{channel}_{self._cluster.index}")
        groups = in_pieces(parts)
        with self._lock:
            for number, group in enumerate(groups):
                last = number == len(groups) - 1
                result = call(
                    tf.constant(self._cluster.secret),
                    header,
                    tf.constant([piece for _, piece in group]),
                    tf.constant([position for position, _ in group], tf.int32),
                    tf.constant(len(parts) if last else 0),
                )
                self._check(result)
        self.bytes_out += len(header.numpy()) * len(groups) + sum(len(part) for part in parts)

    def _check(self, result: Any) -> None:
        if not bool(result.is_ok()):
            code, text = result.get_error()
            raise ConnectionError(_told(int(code), text.numpy().decode(), self))
        if int(result.get_value()) != _TAKEN:
            raise ConnectionError(
                f"the process at {self.address} does not share our secret: wrong cluster?"
            )

    def tell(self, channel: str, facts: dict[str, Any], payload: Any | None = None) -> None:
        """Push a header of facts, with a packed payload if given."""
        empty = tf.constant([""])
        self.push(channel, tf.constant(json.dumps(facts)), empty if payload is None else payload)


def _told(code: int, text: str, peer: Peer) -> str:
    deadline = tf.errors.DEADLINE_EXCEEDED
    if code == deadline or "Deadline" in text:
        return f"the process at {peer.address} took no message for {peer._timeout:g} s"
    if code == tf.errors.UNAVAILABLE:
        return f"the process at {peer.address} is gone"
    return f"the process at {peer.address} refused a message: {text.splitlines()[0][:200]}"
