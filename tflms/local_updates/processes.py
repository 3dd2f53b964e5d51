"""The runtime with one process per chunk: chunk 0 runs ``fit``, the others serve it."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tflms.errors import ConfigError
from tflms.local_updates.assembly import exits_of
from tflms.local_updates.channels import Channel, pack, unpack
from tflms.local_updates.cluster import Cluster, read_cluster
from tflms.local_updates.failure import ChunkError
from tflms.local_updates.pipe import PipeRuntime
from tflms.local_updates.wire import Gate, Peer, State, is_open
from tflms.local_updates.worker import Worker

_LOG = logging.getLogger(__name__)
_WATCH_SECONDS = 0.5
_MANY = 64


class ProcessesRuntime(PipeRuntime):
    """Every process runs the same script; the cluster description says which chunk it trains.

    In chunk 0, ``fit`` reads the data, runs callbacks and validation, and holds all weights after
    each epoch. In the others ``fit`` serves the run and then ends the process.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.cluster: Cluster = read_cluster(chunks=len(trainer.stages))
        self.peers: dict[int, Peer] = {}
        self.worker: Worker | None = None
        self._threads: list[threading.Thread] = []
        self._channels: dict[str, Channel] = {}
        self._gate: Gate | None = None
        self._over = threading.Event()
        self._gathered: list[tuple[int, list[Any]]] = []
        self._remote: dict[int, dict[str, float]] = {}
        self._closed: set[int] = set()

    @property
    def index(self) -> int:
        """The chunk of this process."""
        return self.cluster.index

    # -- set-up --------------------------------------------------------------------------------

    def open(self, dtypes: list[Any]) -> Channel:
        """Connect to the other processes and start this chunk beside ``fit``."""
        try:
            front = self._start(dtypes)
        except ChunkError as error:
            self.fail(error)
            self.end()
            self.raise_failure()
        self._run_thread(self._work, f"chunk-{self.index}")
        return front

    def _start(self, dtypes: list[Any] | None = None) -> Channel:
        """Listen, connect, and make this chunk's worker; return the queue in front of it.

        Args:
            dtypes: what chunk 0 is fed with; its input stays in the process and is not packed.
        """
        trainer, index = self.trainer, self.index
        stage = trainer.stages[index]
        last = index == len(trainer.stages) - 1
        inbox = Channel(trainer.queue_size, dtypes)
        outbox = None if last else Channel(1)
        later = None if last else trainer.stages[index + 1]
        back_in = (
            Channel(1 + len(later.windows)) if later is not None and later.sends_back else None
        )
        back_out = Channel(1) if stage.sends_back else None
        self._channels = {"report": Channel(_MANY), "fault": Channel(_MANY)}
        if index:
            self._channels["forward"] = inbox
        if back_in is not None:
            self._channels["back"] = back_in
        self._gate = Gate(self.cluster, self._channels)
        self._run_thread(self._listen, "chunk-faults")
        self.peers = {
            other: Peer(self.cluster, other, timeout=trainer.timeout)
            for other in range(len(trainer.stages))
            if other != index
        }
        everyone = range(1, len(trainer.stages))
        needed = everyone if index == 0 else [*([] if last else [index + 1]), index - 1, 0]
        for other in dict.fromkeys(other for other in needed if other != index):
            self.peers[other].connect(given_up=lambda: self.failed)
        hello = {
            "kind": "hello",
            "chunk": index,
            "digest": f"{trainer.run_digest()}-{trainer.batches_done}",
        }
        if index:
            self.peers[0].tell("report", hello)
        self.worker = Worker(
            stage,
            inbox=inbox,
            outbox=outbox,
            back_in=back_in,
            back_out=back_out,
            report=self._report,
            stop_on_nan=trainer.stop_on_nan,
            start=trainer.batches_done,
        )
        self._over.clear()
        self._run_thread(self._watch, "chunk-watch")
        if outbox is not None:
            self._run_thread(lambda: self._send(outbox, index + 1, "forward"), "chunk-sender")
        if back_out is not None:
            self._run_thread(lambda: self._send(back_out, index - 1, "back"), "chunk-back")
        if index == 0:
            self._run_thread(self._collect, "chunk-reports")
            self._await_hellos(str(hello["digest"]))
        return inbox

    def _run_thread(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _await_hellos(self, digest: str) -> None:
        limit = time.monotonic() + self.trainer.timeout
        count = len(self.trainer.stages)
        while True:
            with self._changed:
                hellos = [report for report in self.reports if report["kind"] == "hello"]
            for report in hellos:
                if report["digest"] != digest:
                    raise self._told(
                        ChunkError(
                            "its model, split or settings differ from chunk 0's; run the same "
                            "script with the same settings everywhere",
                            chunk=report["chunk"],
                            batch=None,
                        )
                    )
            present = {report["chunk"] for report in hellos}
            missing = [chunk for chunk in range(1, count) if chunk not in present]
            if not missing:
                break
            if self.failed or time.monotonic() > limit:
                self.raise_failure()
                raise self._told(
                    ChunkError(
                        f"its process did not report within {self.trainer.timeout:g} s",
                        chunk=missing[0],
                        batch=None,
                    )
                )
            time.sleep(0.02)
        with self._changed:
            self.reports = [report for report in self.reports if report["kind"] != "hello"]

    def _told(self, error: ChunkError) -> ChunkError:
        self.fail(error)
        return error

    # -- threads beside the worker -------------------------------------------------------------

    def _work(self) -> None:
        assert self.worker is not None
        self.run_worker(self.worker)

    def _send(self, channel: Channel, other: int, name: str) -> None:
        """Carry messages from a local queue to a peer's, one at a time and in order."""
        while True:
            try:
                header, *payload = channel.queue.dequeue()
            except tf.errors.OpError:
                return
            try:
                self.peers[other].push(name, header, payload)
            except ConnectionError as error:
                assert self.worker is not None
                self.fail(ChunkError(str(error), chunk=other, batch=self.worker.batches))
                return
            if json.loads(header.numpy())["kind"] == "close":
                return

    def _report(self, facts: dict[str, Any]) -> None:
        """Tell chunk 0 that this chunk met a token, with its weights where they are wanted."""
        if self.index == 0:
            self.reported(facts)
            return
        payload = None
        if facts["kind"] == "epoch":
            exit_ = self.trainer.stages[self.index].exit
            results = {} if exit_ is None else exit_.results()
            facts["results"] = {name: float(value) for name, value in results.items()}
            payload = pack([tf.convert_to_tensor(v) for v in self._shared_variables(self.index)])
        self.peers[0].tell("report", facts, payload)

    def _collect(self) -> None:
        """Take the other chunks' reports."""
        while True:
            try:
                header, *payload = self._channels["report"].queue.dequeue()
            except tf.errors.OpError:
                return
            facts = json.loads(header.numpy())
            if facts["kind"] == "epoch":
                self._gathered.append((facts["chunk"], unpack(payload)))
                self._remote[facts["chunk"]] = facts["results"]
            if facts["kind"] == "close":
                self._closed.add(facts["chunk"])
            self.reported(facts)

    def _listen(self) -> None:
        """Take what other processes tell about failures."""
        try:
            header, *_ = self._channels["fault"].queue.dequeue()
        except tf.errors.OpError:
            return
        facts = json.loads(header.numpy())
        self.fail(ChunkError(facts["reason"], chunk=facts["chunk"], batch=facts["batch"]))

    def _watch(self) -> None:
        """Notice peers that are gone or frozen, and a chunk that makes no progress."""
        missed_since: dict[int, float] = {}
        watched = range(1, len(self.trainer.stages)) if self.index == 0 else (self.index - 1, 0)
        while not self._over.wait(_WATCH_SECONDS):
            worker = self.worker
            if worker is None:
                continue
            busy = worker.busy_since
            if busy is not None and time.monotonic() - busy > self.trainer.timeout:
                reason = f"no progress for {self.trainer.timeout:g} s (timeout=)"
                self.fail(ChunkError(reason, chunk=self.index, batch=worker.batches))
                return
            for other in dict.fromkeys(watched):
                if other == self.index or other in self._closed or worker.closing.is_set():
                    continue
                peer = self.peers[other]
                now = time.monotonic()
                state = peer.state()
                if state is State.ANSWERS:
                    missed_since.pop(other, None)
                    continue
                missed = time.monotonic() - missed_since.setdefault(other, now)
                # What a peer sent before it ended is still served: it may be a close token.
                idle = worker.inbox.size() == 0 and worker.busy_since is None
                gone = state is State.GONE and missed > 2 * _WATCH_SECONDS and idle
                if gone or missed > self.trainer.timeout:
                    reason = f"its process at {peer.address} {state.value}"
                    self.fail(ChunkError(reason, chunk=other, batch=worker.batches))
                    return

    # -- faults --------------------------------------------------------------------------------

    def fail(self, error: ChunkError) -> None:
        """Take a failure, wake whoever waits here, and tell the other processes."""
        first = not self.failed
        super().fail(error)
        if first:
            for other, peer in sorted(self.peers.items()):
                if is_open(peer.address):
                    self._tell_fault(other, error)

    def _tell_fault(self, other: int, error: ChunkError) -> None:
        facts = {"chunk": error.chunk, "batch": error.batch, "reason": error.reason}
        try:
            messenger = Peer(self.cluster, other, timeout=2.0)
            messenger.connect()
            messenger.tell("fault", facts)
        except (ChunkError, ConnectionError, tf.errors.OpError) as problem:
            _LOG.debug("could not tell chunk %d of the failure: %s", other, problem)

    def close_queues(self) -> None:
        """Wake everyone who waits in this process."""
        for channel in self._channels.values():
            channel.close()
        if self.worker is not None:
            worker = self.worker
            for queue in (worker.inbox, worker.outbox, worker.back_out, worker.back_in):
                if queue is not None:
                    queue.close()

    def end(self) -> None:
        """Stop watching; the threads end with their queues."""
        self._over.set()
        self.close_queues()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)
        self._threads = []

    # -- what the trainer calls ----------------------------------------------------------------

    @contextmanager
    def session(self, name: str) -> Iterator[None]:
        """Surround ``fit``; outside chunk 0 the process serves the run instead, and ends."""
        if name == "fit" and self._gate is not None:
            raise ConfigError(
                "fit() once per trainer in runtime='processes': the other chunks' processes have "
                "ended with the first call; give it all epochs, or start the script again "
                "(resume= goes on from a checkpoint)"
            )
        if name == "fit" and self.index != 0:
            self._serve()
            raise SystemExit(0)
        with super().session(name):
            yield

    def _serve(self) -> None:
        try:
            self._start()
            assert self.worker is not None
            self.run_worker(self.worker)
            self.raise_failure()
        except ChunkError as error:
            self.fail(error)
            self.raise_failure()  # what another process told before counts more
        except ConnectionError as problem:
            self.raise_failure(wait=True)  # the peer has refused because it knows of a failure
            raise ChunkError(str(problem), chunk=0, batch=None) from problem
        finally:
            self.end()

    def reset(self) -> None:
        """Reset the metrics of all chunks at the same batch."""
        self.token("reset")

    def _shared_variables(self, index: int) -> list[Any]:
        """Return what chunk 0 must know of a chunk to evaluate and export."""
        stage = self.trainer.stages[index]
        head = None if stage.exit is None else stage.exit.head
        return [*stage.block.variables, *([] if head is None else head.variables)]

    def results(self) -> dict[str, Any]:
        """Return every exit's metrics as the chunks reported them."""
        found: dict[str, Any] = {}
        for stage, exit_ in exits_of(self.trainer.stages):
            values = exit_.results() if stage.index == 0 else self._remote.get(stage.index, {})
            last = stage is self.trainer.stages[-1]
            for name, value in values.items():
                found[name if last else f"{name}_{stage.index}"] = value
        return found

    def gathered(self) -> None:
        """Take over the weights that came with the epoch's reports."""
        for index, tensors in self._gathered:
            variables = self._shared_variables(index)
            for variable, tensor in zip(variables, tensors, strict=True):
                variable.assign(tensor)
        self._gathered = []

    def traffic(self) -> dict[str, int]:
        """Return the bytes that this process sent to each peer and took from its queue."""
        sent = {f"to chunk {other}": peer.bytes_out for other, peer in sorted(self.peers.items())}
        return {**sent, "received": 0 if self.worker is None else self.worker.bytes_in}
