"""How fast bytes move between host and emulated device, in each direction."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping

from tflms.errors import ConfigError
from tflms.units import parse_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Preset:
    """A real machine, reduced to the one figure that decides whether swapping can hide.

    Attributes:
        ratio: seconds to move all activations of a step over the link once, divided by the seconds
            of a plain step. Under 0.5 a swap out and back fits beside the computation.
        meaning: the machine, in words.
    """

    ratio: float
    meaning: str


PRESETS: Mapping[str, Preset] = types.MappingProxyType(
    {
        "p100-nvlink": Preset(0.6, "Tesla P100, NVLink 1.0 to a POWER8 host"),
        "p100-pcie3": Preset(1.7, "Tesla P100, PCI Express 3.0 x16"),
    }
)
"""Named ratios; ``docs/explanation/emulator.md`` shows how the figures come about."""


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """Rates of the two directions in bytes per second; ``None`` (or 0) is as fast as memory allows.

    Attributes:
        to_host: device to host, bytes per second.
        to_device: host to device, bytes per second.
    """

    to_host: float | None = None
    to_device: float | None = None

    def __post_init__(self) -> None:
        for name in ("to_host", "to_device"):
            rate = getattr(self, name)
            if rate is None:
                continue
            if isinstance(rate, bool) or not isinstance(rate, int | float):
                raise ConfigError(f"link rate {name}={rate!r} is no number of bytes per second")
            if not math.isfinite(rate) or rate < 0:
                raise ConfigError(
                    f"link rate {name}={rate!r} is out of range; "
                    "write bytes per second, or None for no limit"
                )
            object.__setattr__(self, name, float(rate) or None)

    @classmethod
    def from_ratio(cls, ratio: float, *, activation_bytes: float, step_seconds: float) -> Link:
        """Return the link over which a workload meets a given ratio of moving to computing.

        An emulated device computes far slower than a real one, so absolute rates of real links
        would be as good as unlimited. What carries over is the ratio.

        Args:
            ratio: seconds to move all activations once / seconds of a plain step.
            activation_bytes: bytes of all activations that live from forward to backward.
            step_seconds: seconds of a plain step on the emulated device.

        Raises:
            ConfigError: an argument is not a positive number.
        """
        named = {"ratio": ratio, "activation_bytes": activation_bytes, "step_seconds": step_seconds}
        for name, value in named.items():
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ConfigError(f"{name}={value!r} must be a positive number")
        rate = activation_bytes / (ratio * step_seconds)
        return cls(to_host=rate, to_device=rate)

    @classmethod
    def preset(cls, name: str, *, activation_bytes: float, step_seconds: float) -> Link:
        """Return the link that is to this workload what a named machine's link is to a GPU's.

        Args:
            name: a key of ``PRESETS``.
            activation_bytes: bytes of all activations that live from forward to backward.
            step_seconds: seconds of a plain step on the emulated device.

        Raises:
            ConfigError: there is no such preset, or a figure is not a positive number.
        """
        if name not in PRESETS:
            raise ConfigError(f"no link preset {name!r}; there are {', '.join(sorted(PRESETS))}")
        return cls.from_ratio(
            PRESETS[name].ratio, activation_bytes=activation_bytes, step_seconds=step_seconds
        )

    @classmethod
    def parse(cls, text: str) -> Link:
        """Return the link that a text names: ``"unlimited"`` or a rate such as ``"2GB/s"``.

        Raises:
            ConfigError: the text is no rate, or names a preset, which needs a workload's figures.
        """
        if text in PRESETS:
            raise ConfigError(
                f"link {text!r} is a ratio of moving to computing and no rate yet; pass "
                f"Link.preset({text!r}, activation_bytes=..., step_seconds=...)"
            )
        if text.strip().lower() == "unlimited":
            return cls()
        size, slash, second = text.rpartition("/")
        if not slash or second.strip().lower() != "s":
            raise ConfigError(f"{text!r} is no link; write a rate such as '2GB/s', or 'unlimited'")
        rate = float(parse_bytes(size))
        return cls(to_host=rate, to_device=rate)
