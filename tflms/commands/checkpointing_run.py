"""Trains the networks of ``bench checkpointing``: measures costs, then steps in turn."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tflms.errors import ConfigError, InfeasibleError

_WARM_UP_STEPS = 2
_MOST_REFUSALS = 20  # until the least limit is found


@dataclass(frozen=True, slots=True)
class Network:
    """A training graph of the zoo, with sizes at which two cores take a fraction of a second.

    Attributes:
        build: called with image, batch and device; returns a ``TrainingGraph``.
        image: edge of the images in pixels.
        batch: examples per step.
        unknown_batch: whether the graph leaves the batch open.
    """

    build: Callable[[int, int, str], Any]
    image: int
    batch: int
    unknown_batch: bool = False


def networks() -> Mapping[str, Network]:
    """Return what can be benched, by name."""
    from tflms.zoo import graphs

    return {
        "resnet18": Network(lambda i, b, d: graphs.resnet18(i, b, device=d), 112, 16),
        "resnet50": Network(lambda i, b, d: graphs.resnet50(i, b, device=d), 112, 16),
        "resnet101": Network(
            lambda i, b, d: graphs.resnet50(i, b, stages=(3, 4, 23, 3), device=d), 112, 8
        ),
        "densenet121": Network(lambda i, b, d: graphs.densenet121(i, b, device=d), 112, 8),
        "vgg16": Network(lambda i, b, d: graphs.vgg16(i, b, device=d), 96, 8),
        "deep_resnet": Network(lambda i, b, d: graphs.deep_resnet(164, i, b, device=d), 32, 16),
        "mlp": Network(lambda i, b, d: graphs.mlp(batch=b, device=d), 0, 1024, True),
    }


@dataclass(frozen=True, slots=True)
class Measured:
    """What steps of one rewritten graph took.

    Attributes:
        seconds: median of a step.
        peak_bytes: the largest real peak of all steps, variables included.
    """

    seconds: float
    peak_bytes: int


class Bench:
    """One network at one size: builds it anew for each strategy and limit.

    Args:
        name: of the network.
        image: edge of the images; None: the network's own.
        batch: examples per step; likewise.
        folder: where measured costs are kept.

    Raises:
        ConfigError: there is no such network.
    """

    def __init__(self, name: str, image: int | None, batch: int | None, folder: Path) -> None:
        known = networks()
        if name not in known:
            raise ConfigError(f"no model {name!r}; write one of {', '.join(known)}, or all")
        self.name, self.network = name, known[name]
        self.image, self.batch = image or self.network.image, batch or self.network.batch
        self.costs = folder / f"{name}.json"

    def build(self) -> Any:
        """Return the training graph, on the emulated accelerator."""
        from tflms import emulator

        return self.network.build(self.image, self.batch, emulator.device)

    def measure(self) -> int:
        """Measure the costs of operations, and the plain peak; return the latter."""
        from tflms.runtime.measure import measure_costs

        case = self.build()
        measure_costs(
            case.graph, fetches=[case.loss, case.train_op], feeds=case.feed_dict(0),
            init=case.init_op,
        ).save(self.costs)  # fmt: skip
        return interleaved({"plain": case}, 2)["plain"].peak_bytes

    def forward_share(self) -> float:
        """Return what a forward takes of a backward, by the measured costs."""
        from tflms.checkpointing import measure_chain

        case = self.build()
        fetches = [case.loss, case.train_op]
        config = {"cost": str(self.costs), "batch_size": self._batch_size()}
        chain = measure_chain(case.graph, loss=case.loss, fetches=fetches, config=config).chain
        return float(sum(chain.forward_seconds) / sum(chain.backward_seconds))

    def slow_forward(self, times: float) -> None:
        """Let forward operations cost so many times what was measured, for predictions."""
        from tflms.config import Config
        from tflms.planning.cost import Costs
        from tflms.runtime.job import start

        case, costs = self.build(), Costs.load(self.costs)
        config = Config.of({"strategy": "none"})
        fetches = [case.loss, case.train_op]
        job = start(case.graph, config, loss=case.loss, fetches=fetches)
        forward = job.phases.forward
        seconds = [s * times if forward[op] else s for op, s in enumerate(costs.seconds)]
        replace(costs, seconds=tuple(seconds)).save(self.costs)

    def least(self) -> int:
        """Return the least limit that the optimum keeps, by prediction.

        A refusal names a limit that may do; where it does not, the next one is higher.
        """
        limit = 1
        for _ in range(_MOST_REFUSALS):
            try:
                self.rewritten("optimal_checkpointing", limit)
            except InfeasibleError as error:
                limit = max(error.minimum_bytes or 0, limit + limit // 50 + 1)
            else:
                break
        return limit

    def rewritten(self, strategy: str, limit: int) -> tuple[Any, Any]:
        """Return a graph that keeps a limit by a strategy, and the report.

        Raises:
            InfeasibleError: the strategy cannot keep the limit.
        """
        import tflms

        case = self.build()
        config = {
            "strategy": strategy,
            "memory_limit": limit,
            "cost": str(self.costs),
            "batch_size": self._batch_size(),
        }
        fetches = [case.loss, case.train_op]
        return case, tflms.rewrite(case.graph, config, loss=case.loss, fetches=fetches)

    def _batch_size(self) -> int | None:
        return self.batch if self.network.unknown_batch else None


def interleaved(cases: Mapping[str, Any], rounds: int) -> dict[str, Measured]:
    """Train all cases in turn, one step of each in every round, another one first each time.

    What else the machine does hits all alike.
    """
    import tensorflow as tf

    from tflms import emulator

    taken: dict[str, list[float]] = {name: [] for name in cases}
    peaks = dict.fromkeys(cases, 0)
    with contextlib.ExitStack() as stack:
        sessions, owned = {}, {}
        for name, case in cases.items():
            before = emulator.stats().bytes_in_use
            sessions[name] = stack.enter_context(tf.compat.v1.Session(graph=case.graph))
            sessions[name].run(case.init_op)
            owned[name] = emulator.stats().bytes_in_use - before

        def step(name: str, number: int) -> float:
            case = cases[name]
            feeds = case.feed_dict(number)
            emulator.reset_stats()
            others = emulator.stats().bytes_in_use - owned[name]
            begun = time.perf_counter()
            sessions[name].run([case.loss, case.train_op], feeds)
            seconds = time.perf_counter() - begun
            peaks[name] = max(peaks[name], emulator.stats().peak_bytes - others)
            return seconds

        for name in cases:
            for number in range(_WARM_UP_STEPS):
                step(name, number)
        for number in range(_WARM_UP_STEPS, _WARM_UP_STEPS + rounds):
            for name in _rotated(list(cases), number):
                taken[name].append(step(name, number))
    return {name: Measured(statistics.median(taken[name]), peaks[name]) for name in cases}


def _rotated(names: Sequence[str], number: int) -> list[str]:
    start = number % len(names)
    return [*names[start:], *names[:start]]
