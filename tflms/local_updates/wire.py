"""The ends of the wire: a server that guards this process's queues, and clients to other processes.

Messages go over TensorFlow's own gRPC engine. A push returns when the message is in the receiver's
bounded queue, so a slow receiver holds its sender back. The server listens on its given address
alone, and every call must carry the run's secret.
"""

from __future__ import annotations

import itertools
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import tensorflow as tf

from tflms.local_updates.channels import Channel, pack, packed_bytes
from tflms.local_updates.cluster import Cluster
from tflms.local_updates.failure import ChunkError

_LOG = logging.getLogger(__name__)
_TAKEN, _STRANGER = 1, 0
_NUMBERS = itertools.count()
_PROBE_SECONDS = 1.0
_PAUSE_SECONDS = 0.1
_ANSWER_SECONDS = 5.0  # for one try to connect
_PIECE_BYTES = 7 * 2**19  # 3.5 MiB: gRPC refuses calls over 4 MiB, header and frame included


class State(Enum):
    """What a look at another process finds."""

    ANSWERS = "answers"
    SILENT = "does not answer"
    GONE = "is gone"


def probe(address: str) -> State:
    """Return whether something takes connections at an address, or the machine refuses them."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_SECONDS).close()
    except ConnectionRefusedError:
        return State.GONE
    except OSError:
        return State.SILENT
    return State.ANSWERS


def is_open(address: str) -> bool:
    """Whether something listens at an address."""
    return probe(address) is State.ANSWERS


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
                f"something else listens at {address}: is this chunk started twice, or is there "
                "a second trainer in this process?",
                chunk=cluster.index,
                batch=None,
            )
        self._server = tf.distribute.experimental.rpc.Server.create("grpc", address)
        alive = _alive(cluster.secret)
        self._server.register("alive", alive)
        self._kept: list[Any] = [alive]  # the server does not keep its functions alive
        for name, channel in sorted(channels.items()):
            for sender in range(len(cluster.addresses)):
                if sender != cluster.index:
                    entry = _Entry(cluster.secret, channel)
                    self._kept.append(entry)
                    self._server.register(f"{name}_{sender}", entry.push)
        self._server.start()


def _alive(secret: str) -> Any:
    """Return a function that tells those who know the secret that this process runs."""
    expected = tf.constant(secret)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec((), tf.string)])
    def alive(given: Any) -> Any:
        return tf.where(tf.equal(given, expected), _TAKEN, _STRANGER)

    return alive


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
                tf.TensorSpec((), tf.string),
                tf.TensorSpec((None,), tf.string),
                tf.TensorSpec((None,), tf.int32),
                tf.TensorSpec((), tf.int32),
            ],
        )
        def push(given: Any, header: Any, first: Any, more: Any, places: Any, count: Any) -> Any:
            def complete() -> Any:
                payload = tf.strings.unsorted_segment_join(pieces, segments, count)
                with tf.control_dependencies([payload]):
                    pieces.assign(tf.zeros([0], tf.string))
                    segments.assign(tf.zeros([0], tf.int32))
                channel.queue.enqueue([header, first, payload])
                return tf.constant(_TAKEN)

            def whole() -> Any:
                channel.queue.enqueue([header, first, more])
                return tf.constant(_TAKEN)

            def piece() -> Any:
                pieces.assign(tf.concat([pieces, more], 0))
                segments.assign(tf.concat([segments, places], 0))
                return tf.cond(count > 0, complete, lambda: tf.constant(_TAKEN))

            def take() -> Any:
                alone = tf.logical_and(count > 0, tf.equal(tf.size(pieces), 0))
                return tf.cond(alone, whole, piece)

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

    def connect(self, *, given_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until the peer listens, then connect.

        Args:
            given_up: asked again and again; true ends the waiting.

        Raises:
            ChunkError: it does not listen, or does not answer, within the timeout.
        """
        limit = time.monotonic() + self._timeout
        trouble = f"nothing listens at {self.address}"
        while True:
            # A client made for a closed port hangs inside TensorFlow: look first.
            if is_open(self.address):
                try:
                    self._client = self._new_client()
                    return
                except tf.errors.OpError as problem:  # it may be starting, or ending
                    trouble = f"what listens at {self.address} is no chunk's process"
                    _LOG.debug("chunk %d does not answer: %s", self.index, problem)
            if given_up() or time.monotonic() > limit:
                raise ChunkError(
                    f"{trouble} after {self._timeout:g} s; start that chunk's process, or correct "
                    "its address",
                    chunk=self.index,
                    batch=None,
                )
            time.sleep(_PAUSE_SECONDS)

    def _new_client(self) -> Any:
        return tf.distribute.experimental.rpc.Client.create(
            "grpc",
            address=self.address,
            # TensorFlow keeps clients by name: one that is made anew under a name in use, and then
            # dropped, takes the other one away under a running call.
            name=f"to_chunk_{self.index}_{next(_NUMBERS)}",
            timeout_in_ms=int(min(_ANSWER_SECONDS, self._timeout) * 1000),
        )

    def state(self) -> State:
        """Look at the connected peer: a frozen process still takes connections, but no calls."""
        found = probe(self.address)
        if found is not State.ANSWERS or self._client is None:
            return found
        secret = tf.constant(self._cluster.secret)
        answer = self._call("alive", secret, seconds=min(_ANSWER_SECONDS, self._timeout))
        return State.SILENT if answer.code else State.ANSWERS

    def push(self, channel: str, header: Any, payload: Sequence[Any]) -> None:
        """Append a message to one of the peer's channels; waits while it is full.

        Raises:
            ConnectionError: the peer refused the message, is gone, or did not take it in time.
        """
        name = f"{channel}_{self._cluster.index}"
        secret = tf.constant(self._cluster.secret)
        first, rest = payload
        count, nbytes = int(tf.size(rest)), packed_bytes(payload)
        if nbytes <= _PIECE_BYTES:
            with self._lock:
                self._taken(name, secret, header, first, rest, tf.range(count), tf.constant(count))
            self.bytes_out += len(header.numpy()) + nbytes
            return
        names, *others = rest.numpy()
        parts = [names, first.numpy(), *others] if first.numpy() else [names, *others]
        groups = in_pieces(parts)
        with self._lock:
            for number, group in enumerate(groups):
                last = number == len(groups) - 1
                self._taken(
                    name,
                    secret,
                    header,
                    tf.constant(""),
                    tf.constant([piece for _, piece in group]),
                    tf.constant([position for position, _ in group], tf.int32),
                    tf.constant(len(parts) if last else 0),
                )
        self.bytes_out += len(header.numpy()) * len(groups) + nbytes

    def _taken(self, name: str, *arguments: Any) -> None:
        answer = self._call(name, *arguments, seconds=self._timeout)
        if answer.code:
            raise ConnectionError(_told(answer, self))
        if answer.value != _TAKEN:
            raise ConnectionError(
                f"the process at {self.address} does not share our secret: wrong cluster?"
            )

    def _call(self, name: str, *arguments: Any, seconds: float) -> _Answer:
        """Call a function of the peer, wait, and return what came of it.

        TensorFlow's result object frees itself by an operation. It must go here: if an exception
        kept it and the garbage collector met it while some graph is traced, the process would stop
        for good in a lock of TensorFlow's.
        """
        result = getattr(self._client, name)(*arguments, timeout_in_ms=int(seconds * 1000))
        try:
            if bool(result.is_ok()):
                return _Answer(0, "", int(result.get_value()))
            code, text = result.get_error()
            return _Answer(int(code), text.numpy().decode(), _STRANGER)
        finally:
            del result

    def tell(
        self, channel: str, facts: dict[str, Any], payload: Sequence[Any] | None = None
    ) -> None:
        """Push a header of facts, with packed tensors if given."""
        self.push(channel, tf.constant(json.dumps(facts)), payload or pack([]))


@dataclass(frozen=True, slots=True)
class _Answer:
    """TensorFlow's error code (0: none) and text, and the value that the peer returned."""

    code: int
    text: str
    value: int


def _told(answer: _Answer, peer: Peer) -> str:
    if answer.code == tf.errors.DEADLINE_EXCEEDED or "Deadline" in answer.text:
        return f"the process at {peer.address} took no message for {peer._timeout:g} s"
    if answer.code == tf.errors.UNAVAILABLE:
        return f"the process at {peer.address} is gone"
    return f"the process at {peer.address} refused a message: {answer.text.splitlines()[0][:200]}"
