"""The settings of a rewrite, validated once; the only place where defaults live."""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tflms import units
from tflms.errors import ConfigError

SWAPPING = ("chain_rule", "direct_order", "auto", "none")
# What recomputes: the optimum, its extension, and what they are compared with.
CHECKPOINTING = (
    "optimal_checkpointing", "drop_inputs", "save_all", "recompute_all", "periodic",
    "best_periodic", "sqrt_n", "revolve", "revolve_heterogeneous",
)  # fmt: skip
WITHOUT_LIMIT = ("save_all", "recompute_all", "periodic")  # of these, what needs no limit
STRATEGIES = SWAPPING + CHECKPOINTING
MIN_SWAP_NBYTES = 64 * 1024  # a smaller transfer costs more in latency than it frees


@dataclass(frozen=True, slots=True)
class Config:
    """How a training graph is to be rewritten; see ``docs/reference/config.md`` for each field.

    Raises:
        ConfigError: a value has the wrong type or is out of range; the message names the key, the
            value and what is allowed.
    """

    strategy: str | None = None
    memory_limit: int | float | str | None = None
    host_memory_limit: int | str | None = None
    n_tensors: int = -1
    lb: int = 1
    ub: int = 10000
    fuse_swapins: bool = True
    fuse_distance: int | None = None
    swap_branches: bool = False
    branch_threshold: int = 0
    incl_scopes: tuple[str, ...] = ()
    excl_scopes: tuple[str, ...] = ()
    incl_types: tuple[str, ...] = ()
    excl_types: tuple[str, ...] = ()
    optimizer_scopes: tuple[str, ...] | None = None
    starting_scope: str | None = None
    starting_op_names: tuple[str, ...] | None = None
    min_swap_bytes: int | str = MIN_SWAP_NBYTES
    recompute: bool = True
    batch_size: int | None = None
    cost: str = "static"
    device: str | None = None
    host_device: str = "/cpu:0"

    def __post_init__(self) -> None:
        """Check every field and bring it into its normal form."""
        for key in ("incl_scopes", "excl_scopes", "incl_types", "excl_types"):
            self._set(key, _names(key, getattr(self, key)))
        for key in ("optimizer_scopes", "starting_op_names"):
            if getattr(self, key) is not None:
                self._set(key, _names(key, getattr(self, key)))
        for key in ("n_tensors", "lb", "ub", "branch_threshold"):
            _whole(key, getattr(self, key), -1 if key == "n_tensors" else 0)
        for key in ("fuse_distance", "batch_size"):
            if getattr(self, key) is not None:
                _whole(key, getattr(self, key), 1 if key == "batch_size" else 0)
        for key in ("fuse_swapins", "swap_branches", "recompute"):
            if not isinstance(getattr(self, key), bool):
                raise ConfigError(f"{key} is {getattr(self, key)!r}; write True or False")
        for key in ("cost", "host_device"):
            _text(key, getattr(self, key))
        for key in ("device", "starting_scope"):
            if getattr(self, key) is not None:
                _text(key, getattr(self, key))
        if self.lb < 1:
            raise ConfigError(f"lb is {self.lb}; an anchor lies at least 1 level before its use")
        if self.lb > self.ub:
            raise ConfigError(f"lb is {self.lb} and ub is {self.ub}; lb must not be larger than ub")
        self._set("min_swap_bytes", _size("min_swap_bytes", self.min_swap_bytes))
        if self.host_memory_limit is not None:
            self._set("host_memory_limit", _size("host_memory_limit", self.host_memory_limit))
        if self.memory_limit is not None:
            self._set("memory_limit", _limit(self.memory_limit))
        if self.strategy is None:
            self._set("strategy", "chain_rule" if self.memory_limit is None else "auto")
        if self.strategy not in STRATEGIES:
            raise ConfigError(_unknown("strategy", self.strategy, STRATEGIES))
        limited = self.strategy in CHECKPOINTING and self.strategy not in WITHOUT_LIMIT
        if limited and self.memory_limit is None:
            raise ConfigError(
                f"strategy {self.strategy!r} recomputes as much as a memory_limit asks for; set it "
                "to the device's bytes, '8GiB', or a fraction such as 0.6 of the step's peak"
            )

    def _set(self, key: str, value: Any) -> None:
        object.__setattr__(self, key, value)

    @classmethod
    def of(cls, config: Config | Mapping[str, Any] | None) -> Config:
        """Return a Config from a Config, a dict, or None for the defaults.

        Raises:
            ConfigError: it is something else, or holds what a Config may not.
        """
        if config is None:
            return cls()
        if isinstance(config, Config):
            return config
        if isinstance(config, Mapping):
            return cls.from_dict(config)
        raise ConfigError(
            f"a config is a tflms.Config or a dict, not {type(config).__name__} ({config!r})"
        )

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Config:
        """Build a Config from a dict.

        Raises:
            ConfigError: a key is unknown (the message names the nearest known one), or a value
                is not allowed.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for key in settings:
            if key not in known:
                raise ConfigError(_unknown("config key", key, known))
        return cls(**settings)

    @classmethod
    def from_file(cls, path: str | Path) -> Config:
        """Read a Config from a TOML or JSON file.

        Raises:
            ConfigError: the file cannot be read, or holds what a Config may not.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the config file {str(path)!r}: {error}") from None
        if not isinstance(data, dict):
            raise ConfigError(f"{str(path)!r} holds no table of settings")
        return cls.from_dict(data)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a dict that ``from_dict`` reads back."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self).items()
        }

    def replace(self, **changes: Any) -> Config:
        """Return a copy with some settings changed."""
        return dataclasses.replace(self, **changes)


def _unknown(what: str, given: object, known: Any) -> str:
    near = difflib.get_close_matches(str(given), list(known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {given!r}{hint} (known: {', '.join(known)})"


def _text(key: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key} is {value!r}; write a text")


def _names(key: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple | set | frozenset):
        raise ConfigError(f"{key} is {value!r}; write a list of names")
    for name in value:
        _text(key, name)
    return tuple(sorted(value) if isinstance(value, set | frozenset) else value)


def _whole(key: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{key} is {value!r}; write a whole number")
    if value < least:
        raise ConfigError(f"{key} is {value}; the least allowed is {least}")


def _size(key: str, value: object) -> int:
    if isinstance(value, str):
        return units.parse_bytes(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{key} is {value!r}; write bytes as a whole number or '64KiB'")
    if value < 0:
        raise ConfigError(f"{key} is {value}; a size is not negative")
    return value


def _limit(value: object) -> int | float:
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise ConfigError(
                f"memory_limit is {value}; a fraction of the un-rewritten peak lies in (0, 1], "
                "bytes are a whole number or a text such as '8GiB'"
            )
        return value
    size = _size("memory_limit", value)
    if size == 0:
        raise ConfigError("memory_limit is 0; write the bytes that the device has")
    return size
