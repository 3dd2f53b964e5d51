"""What a child process of a command is asked to train, and what it tells afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Job:
    """A training run on the emulated accelerator, in a process of its own.

    Attributes:
        model: a builder of ``tflms.zoo.graphs``.
        arguments: its keyword arguments.
        memory_bytes: of the emulated device.
        steps: training steps per session.
        config: how the graph is rewritten; None leaves it as it is.
        sessions: how often the training is repeated from its start, each time in a new session.
        brain_size: voxels per edge of the brain volume that a U-Net's cubes are cut from, a new
            one each step; None trains on the builder's own data.
        verify: look for the inserted operations in the optimised graphs.
    """

    model: str
    arguments: dict[str, Any]
    memory_bytes: int
    steps: int
    config: dict[str, Any] | None = None
    sessions: int = 1
    brain_size: int | None = None
    verify: bool = False


@dataclass(frozen=True, slots=True)
class Training:
    """What one session's training was like, step by step.

    Attributes:
        losses: float32 values, exactly.
        peak_bytes: of the device's allocator, per step.
        to_host_bytes: moved from the device, per step.
        to_device_bytes: moved to the device, per step.
        seconds: per step; the first one includes what TensorFlow does once.
        variables: name and SHA-256 of the final value of every variable.
    """

    losses: list[float]
    peak_bytes: list[int]
    to_host_bytes: list[int]
    to_device_bytes: list[int]
    seconds: list[float]
    variables: dict[str, str]


@dataclass(frozen=True, slots=True)
class Alive:
    """How many inserted operations an optimised graph still has."""

    expected: int
    survived: int

    @property
    def ok(self) -> bool:
        """Whether there were any and all of them are left."""
        return 0 < self.expected == self.survived


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job.

    Attributes:
        trainings: one per session that ended well.
        out_of_memory: the device's error, its first telling line; None where all went well.
        before_run: inserted operations in the graph that Grappler makes of it; None if not asked.
        in_run: inserted operations in the partition graphs of the first run; None if not asked.
        report: the rewrite's report as plain data; None for an un-rewritten graph.
    """

    trainings: list[Training] = field(default_factory=list)
    out_of_memory: str | None = None
    before_run: Alive | None = None
    in_run: Alive | None = None
    report: dict[str, Any] | None = None

    @property
    def fits(self) -> bool:
        """Whether the device's memory was enough."""
        return self.out_of_memory is None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Outcome:
        """Build an outcome from what ``dataclasses.asdict`` made of one."""
        alive = {
            key: None if data[key] is None else Alive(**data[key])
            for key in ("before_run", "in_run")
        }
        trainings = [Training(**training) for training in data["trainings"]]
        return cls(**{**data, **alive, "trainings": trainings})
