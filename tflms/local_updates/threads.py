"""The runtime with one thread per chunk and device, and a bounded queue in front of each."""

from __future__ import annotations

import threading
import time
from typing import Any

from tflms.local_updates.channels import Channel
from tflms.local_updates.failure import ChunkError
from tflms.local_updates.pipe import PipeRuntime
from tflms.local_updates.worker import Worker


class ThreadsRuntime(PipeRuntime):
    """Each chunk in its own thread; TensorFlow releases the interpreter while it computes."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.workers: list[Worker] = []
        self._threads: list[threading.Thread] = []
        self._channels: list[Channel] = []
        self._over = threading.Event()

    def open(self, dtypes: list[Any]) -> Channel:
        """Make the queues and start the threads."""
        stages = self.trainer.stages
        inputs = len(self.trainer.source.inputs)
        extra = dtypes[inputs:]
        size = self.trainer.queue_size
        cuts = self.trainer.plan.cuts
        forward = [Channel(size, dtypes), *[Channel(size, [*cut.dtypes, *extra]) for cut in cuts]]
        back: list[Channel | None] = []
        for stage, cut in zip(stages[1:], cuts, strict=True):
            floats = [dtype for dtype in cut.dtypes if "float" in dtype]
            reach = 1 + len(stage.windows)
            back.append(Channel(reach, floats) if stage.sends_back else None)
        self.workers = [
            Worker(
                stage,
                inbox=forward[stage.index],
                outbox=forward[stage.index + 1] if stage is not stages[-1] else None,
                back_in=back[stage.index] if stage is not stages[-1] else None,
                back_out=back[stage.index - 1] if stage.index else None,
                report=self.reported,
                stop_on_nan=self.trainer.stop_on_nan,
                start=self.trainer.batches_done,
            )
            for stage in stages
        ]
        self._channels = [*forward, *[channel for channel in back if channel is not None]]
        self._over.clear()
        self._threads = [
            threading.Thread(target=self.run_worker, args=(worker,), name=f"chunk-{index}")
            for index, worker in enumerate(self.workers)
        ]
        self._threads.append(threading.Thread(target=self._watch, name="chunk-watch"))
        for thread in self._threads:
            thread.daemon = True
            thread.start()
        return forward[0]

    def _watch(self) -> None:
        """Give the run up when one batch keeps a chunk busy for longer than the timeout."""
        limit = self.trainer.timeout
        while not self._over.wait(min(0.2, limit / 4)):
            now = time.monotonic()
            stuck = [
                (worker.busy_since, worker)
                for worker in self.workers
                if worker.busy_since is not None and now - worker.busy_since > limit
            ]
            if stuck:
                # Others wait for the last one of them (its queue is full or it owes cotangents).
                worker = max(stuck, key=lambda entry: entry[1].stage.index)[1]
                self.fail(
                    ChunkError(
                        f"no progress for {limit:g} s (timeout=)",
                        chunk=worker.stage.index,
                        batch=worker.batches,
                    )
                )
                return

    def close_queues(self) -> None:
        """Wake every chunk that waits."""
        for channel in self._channels:
            channel.close()

    def end(self) -> None:
        """Let the threads go; one that is stuck inside a step ends when the step does."""
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=min(5.0, self.trainer.timeout))
        self._threads = []
        self._channels = []
