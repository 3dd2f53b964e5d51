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
        self._functions = []
        for name, channel in sorted(channels.items()):
            function = _guarded_push(cluster.secret, channel)
            self._functions.append(function)  # the server does not keep them alive
            self._server.register(name, function)
        self._server.start()


def _guarded_push(secret: str, channel: Channel) -> Any:
    expected = tf.constant(secret)

    @tf.function(
        autograph=False,
        input_signature=[
            tf.TensorSpec((), tf.string),
            tf.TensorSpec((), tf.string),
            tf.TensorSpec((None,), tf.string),
        ],
    )
    def push(given: Any, header: Any, payload: Any) -> Any:
        def take() -> Any:
            channel.queue.enqueue([header, payload])
            return tf.constant(_TAKEN)

        return tf.cond(tf.equal(given, expected), take, lambda: tf.constant(_STRANGER))

    return push


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
        with self._lock:
            result = getattr(self._client, channel)(
                tf.constant(self._cluster.secret), header, payload
            )
            if not bool(result.is_ok()):
                code, text = result.get_error()
                raise ConnectionError(_told(int(code), text.numpy().decode(), self))
            if int(result.get_value()) != _TAKEN:
                raise ConnectionError(
                    f"the process at {self.address} does not share our secret: wrong cluster?"
                )
        self.bytes_out += len(header.numpy()) + sum(len(part) for part in payload.numpy())

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
