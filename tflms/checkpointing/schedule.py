"""A checkpointing schedule: its operations, what they cost, and its forms on paper and on disk."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tflms.checkpointing.chain import Chain
from tflms.checkpointing.diagram import draw
from tflms.checkpointing.operations import Kind, Operation, Replay, replay
from tflms.errors import ConfigError, InvariantError
from tflms.units import format_bytes

_FORMAT = "tflms.checkpointing.schedule/1"
_KEYS = (
    "strategy",
    "makespan_seconds",
    "peak_bytes",
    "memory_limit_bytes",
    "exact",
    "rounding_loss_bytes",
    "chain",
    "operations",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The operations that compute all gradients of a chain, with their time and peak.

    Attributes:
        strategy: the name of what chose the operations.
        chain: the chain that they run on.
        operations: what runs, in order; stages are numbered from 1.
        makespan: seconds, the sum of all durations.
        peak_bytes: the most that activations, saved sets, gradients and workspaces take at any
            time.
        memory_limit: the limit that was asked for, in bytes; None: no limit.
        exact: whether rounding sizes to slots was without effect on the choice (True also for
            strategies that do not round).
        rounding_loss_bytes: by how much the rounded sizes of what is stored exceed the true ones
            at the worst moment: the table took so much of the limit as used; 0 where exact.
    """

    strategy: str
    chain: Chain = field(repr=False)
    operations: tuple[Operation, ...] = field(repr=False)
    makespan: float
    peak_bytes: int
    memory_limit: int | None = None
    exact: bool = True
    rounding_loss_bytes: int = 0

    @classmethod
    def of(
        cls,
        chain: Chain,
        operations: Iterable[Operation],
        *,
        strategy: str,
        memory_limit: int | None = None,
        exact: bool = True,
        rounding_loss_bytes: int = 0,
    ) -> Schedule:
        """Return the schedule of the operations, with time and peak found by replaying them.

        Raises:
            InvariantError: the operations cannot run in this order, or they exceed the limit.
        """
        listed = tuple(operations)
        replayed = replay(chain, listed)
        if memory_limit is not None and replayed.peak_bytes > memory_limit:
            raise InvariantError(
                f"a schedule of {strategy} peaks at {replayed.peak_bytes} bytes, over the limit of "
                f"{memory_limit}; this is a bug of the solver"
            )
        return cls(
            strategy=strategy,
            chain=chain,
            operations=listed,
            makespan=replayed.makespan,
            peak_bytes=replayed.peak_bytes,
            memory_limit=memory_limit,
            exact=exact,
            rounding_loss_bytes=rounding_loss_bytes,
        )

    @property
    def recomputed_seconds(self) -> float:
        """Seconds beyond one F_all and one B of each stage: the price of the memory saved."""
        return self.makespan - self.chain.least_seconds

    def count(self, *kinds: Kind) -> int:
        """Return how many operations are of the given kinds (of any kind if none is given)."""
        counts = Counter(operation.kind for operation in self.operations)
        return sum(counts[kind] for kind in (kinds or tuple(Kind)))

    def replay(self) -> Replay:
        """Run the operations in the memory model of ``operations.replay`` and return every step."""
        return replay(self.chain, self.operations)

    def diagram(self, width: int = 100) -> str:
        """Return a drawing: time to the right, a row a stage, and memory at the bottom.

        Args:
            width: columns at most; longer schedules are drawn several operations a column.
        """
        return draw(self.chain, self.replay(), width)

    def __str__(self) -> str:
        limit = "none" if self.memory_limit is None else format_bytes(self.memory_limit)
        share = self.recomputed_seconds / self.chain.least_seconds if self.makespan else 0.0
        return (
            f"{self.strategy}: {len(self.operations)} operations on {self.chain.stages} stages, "
            f"{self.makespan:.6g} s ({share:+.1%} recomputed), "
            f"peak {format_bytes(self.peak_bytes)} of limit {limit}"
        )

    def to_json(self) -> str:
        """Return the schedule and its chain as JSON text."""
        return json.dumps(
            {
                "format": _FORMAT,
                "strategy": self.strategy,
                "makespan_seconds": self.makespan,
                "peak_bytes": self.peak_bytes,
                "memory_limit_bytes": self.memory_limit,
                "exact": self.exact,
                "rounding_loss_bytes": self.rounding_loss_bytes,
                "chain": self.chain.to_dict(),
                "operations": [[str(kind), stage] for kind, stage in self.operations],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Return the schedule that ``to_json`` wrote, replayed and compared with what it claims.

        Raises:
            ConfigError: the text is no such schedule, or its time or peak is not what a replay
                gives.
            InvariantError: the operations cannot run in this order.
        """
        data = _parsed(text)
        schedule = cls.of(
            Chain.from_dict(data["chain"]),
            _operations(data["operations"]),
            strategy=str(data["strategy"]),
            memory_limit=data["memory_limit_bytes"],
            exact=bool(data["exact"]),
            rounding_loss_bytes=int(data["rounding_loss_bytes"]),
        )
        for name, claimed, found in (
            ("makespan_seconds", data["makespan_seconds"], schedule.makespan),
            ("peak_bytes", data["peak_bytes"], schedule.peak_bytes),
        ):
            if not isinstance(claimed, int | float) or not math.isclose(claimed, found):
                raise ConfigError(
                    f"the schedule claims {name} {claimed!r}, but its operations give {found!r}; "
                    "the file was changed by hand or is damaged"
                )
        return schedule


def _parsed(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"a schedule must be JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ConfigError(f"a schedule must be a JSON object with format {_FORMAT!r}")
    missing = [key for key in _KEYS if key not in data]
    if missing:
        raise ConfigError(f"the schedule lacks {', '.join(missing)}")
    return data


def _operations(pairs: Any) -> list[Operation]:
    try:
        return [Operation(Kind(kind), int(stage)) for kind, stage in pairs]
    except (TypeError, ValueError) as error:
        kinds = ", ".join(Kind)
        raise ConfigError(
            f"operations must be pairs of a kind (one of {kinds}) and a stage: {error}"
        ) from None
