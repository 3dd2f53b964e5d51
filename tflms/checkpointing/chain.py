"""What a chain of stages costs: the input of every checkpointing solver."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tflms.errors import ConfigError

_MOST_BYTES = 1 << 56  # sums of several such sizes still fit in 64 bits


@dataclass(frozen=True, slots=True, init=False)
class Chain:
    """A network as stages 1..n, each mapping activation a^(l-1) to a^l; the loss may be the last.

    Entry ``l - 1`` of a sequence of n values belongs to stage l; entry ``l`` of a sequence of n + 1
    values belongs to a^l (entry 0: the chain's input). A loss stage usually costs no time and no
    bytes. Sequences of any kind are accepted and kept as tuples.

    Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains" (2019).

    Attributes:
        forward_seconds: n durations of F_all, the forward that keeps what backward needs.
        backward_seconds: n durations of B.
        activation_bytes: n + 1 sizes of the activations a^0 .. a^n.
        saved_bytes: n sizes of what F_all keeps: the stage's output included, its input not.
        gradient_bytes: n + 1 sizes of the gradients with respect to a^0 .. a^n; default: as the
            activations.
        forward_overhead_bytes: n sizes of the workspace of F_all beyond what it keeps; default 0.
        backward_overhead_bytes: n sizes of the workspace of B beyond the gradient that it produces;
            default 0.
        forward_only_seconds: n durations of F_null and F_ck, the forwards that keep only the
            output; default: as F_all.
        forward_only_overhead_bytes: n sizes of the workspace of F_null and F_ck beyond the output;
            default: as F_all.

    Raises:
        ConfigError: lengths do not agree, a value is negative, not finite or (bytes) not a whole
            number, or a stage keeps less than its own output.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    forward_overhead_bytes: tuple[int, ...]
    backward_overhead_bytes: tuple[int, ...]
    forward_only_seconds: tuple[float, ...]
    forward_only_overhead_bytes: tuple[int, ...]

    def __init__(
        self,
        forward_seconds: Iterable[float],
        backward_seconds: Iterable[float],
        activation_bytes: Iterable[int],
        saved_bytes: Iterable[int],
        gradient_bytes: Iterable[int] | None = None,
        forward_overhead_bytes: Iterable[int] | None = None,
        backward_overhead_bytes: Iterable[int] | None = None,
        forward_only_seconds: Iterable[float] | None = None,
        forward_only_overhead_bytes: Iterable[int] | None = None,
    ) -> None:
        forward = _seconds("forward_seconds", forward_seconds)
        activations = _nbytes("activation_bytes", activation_bytes)
        overhead = _optional_nbytes(
            "forward_overhead_bytes", forward_overhead_bytes, (0,) * len(forward)
        )
        values: dict[str, tuple[float, ...] | tuple[int, ...]] = {
            "forward_seconds": forward,
            "backward_seconds": _seconds("backward_seconds", backward_seconds),
            "activation_bytes": activations,
            "saved_bytes": _nbytes("saved_bytes", saved_bytes),
            "gradient_bytes": _optional_nbytes("gradient_bytes", gradient_bytes, activations),
            "forward_overhead_bytes": overhead,
            "backward_overhead_bytes": _optional_nbytes(
                "backward_overhead_bytes", backward_overhead_bytes, (0,) * len(forward)
            ),
            "forward_only_seconds": forward
            if forward_only_seconds is None
            else _seconds("forward_only_seconds", forward_only_seconds),
            "forward_only_overhead_bytes": _optional_nbytes(
                "forward_only_overhead_bytes", forward_only_overhead_bytes, overhead
            ),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check_lengths()
        self._check_saved_holds_output()

    @property
    def stages(self) -> int:
        """The number of stages n, a loss stage included."""
        return len(self.forward_seconds)

    @property
    def ends_in_loss(self) -> bool:
        """Whether the last stage has no output, which is how a loss stage is told."""
        return self.activation_bytes[-1] == 0

    @property
    def least_seconds(self) -> float:
        """The time of one F_all and one B a stage, below which no schedule can go."""
        return math.fsum(self.forward_seconds + self.backward_seconds)

    def to_dict(self) -> dict[str, list[float] | list[int]]:
        """Return the fields as lists, ready for JSON."""
        return {field.name: list(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Chain:
        """Return the chain that ``to_dict`` described.

        Raises:
            ConfigError: a key is unknown or missing, or a value does not fit.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(data) - set(known))
        missing = [name for name in known[:4] if name not in data]
        if unknown or missing:
            raise ConfigError(
                f"a chain has the keys {', '.join(known)}; "
                f"unknown: {', '.join(unknown) or 'none'}; missing: {', '.join(missing) or 'none'}"
            )
        return cls(**data)

    def _check_lengths(self) -> None:
        n = self.stages
        if n == 0:
            raise ConfigError("a chain needs at least one stage; forward_seconds is empty")
        for field in fields(self):
            points = field.name in ("activation_bytes", "gradient_bytes")
            found, expected = len(getattr(self, field.name)), n + 1 if points else n
            if found != expected:
                what = "one a stage and one for the chain's input" if points else "one a stage"
                raise ConfigError(
                    f"{field.name} has {found} values, but forward_seconds has {n}, so "
                    f"{expected} are expected ({what})"
                )

    def _check_saved_holds_output(self) -> None:
        for stage in range(1, self.stages + 1):
            saved, output = self.saved_bytes[stage - 1], self.activation_bytes[stage]
            if saved < output:
                raise ConfigError(
                    f"saved_bytes[{stage - 1}] is {saved}, less than the {output} bytes of the "
                    f"output of stage {stage}; what F_all keeps includes the output, so add it"
                )


def _listed(name: str, values: Iterable[Any]) -> list[Any]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ConfigError(f"{name} must be a sequence of numbers, not {values!r}")
    tolist = getattr(values, "tolist", None)  # numpy scalars become Python numbers
    listed = tolist() if callable(tolist) else list(values)
    if not isinstance(listed, Sequence):
        raise ConfigError(f"{name} must be a sequence of numbers, not the single value {listed!r}")
    return list(listed)


def _number(name: str, index: int, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{name}[{index}] is {value!r}, which is not a number") from None
    if not math.isfinite(number):
        raise ConfigError(f"{name}[{index}] is {value!r}; a finite number is needed")
    if number < 0:
        raise ConfigError(f"{name}[{index}] is {value!r}; it cannot be negative")
    return number


def _seconds(name: str, values: Iterable[float]) -> tuple[float, ...]:
    return tuple(_number(name, index, value) for index, value in enumerate(_listed(name, values)))


def _nbytes(name: str, values: Iterable[int]) -> tuple[int, ...]:
    result = []
    for index, value in enumerate(_listed(name, values)):
        if not _number(name, index, value).is_integer():
            raise ConfigError(f"{name}[{index}] is {value!r}; bytes are whole numbers, round up")
        if int(value) > _MOST_BYTES:
            raise ConfigError(f"{name}[{index}] is {value!r}; more than {_MOST_BYTES} is no size")
        result.append(int(value))
    return tuple(result)


def _optional_nbytes(
    name: str, values: Iterable[int] | None, default: tuple[int, ...]
) -> tuple[int, ...]:
    return default if values is None else _nbytes(name, values)
