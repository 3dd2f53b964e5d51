"""Knows which process runs which chunk and where it listens: a description like ``TF_CONFIG``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from tflms.errors import ConfigError

VARIABLE = "TFLMS_CLUSTER"
SECRET_VARIABLE = "TFLMS_SECRET"
_EXAMPLE = (
    '{"cluster": {"chunk": ["10.0.0.1:4000", "10.0.0.2:4000"]}, '
    '"task": {"type": "chunk", "index": 0}}'
)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The processes of a run.

    Attributes:
        addresses: ``host:port`` of each chunk's process; it listens on that address alone.
        index: the chunk of this process.
        secret: token that every message must carry.
    """

    addresses: tuple[str, ...]
    index: int
    secret: str = field(repr=False)


def describe(addresses: list[str], index: int) -> str:
    """Return the description of a cluster for one process, as ``TFLMS_CLUSTER`` wants it."""
    return json.dumps({"cluster": {"chunk": addresses}, "task": {"type": "chunk", "index": index}})


def read_cluster(environment: Mapping[str, str] | None = None, *, chunks: int) -> Cluster:
    """Read the cluster that this process belongs to.

    Args:
        environment: environment variables; default: the process's.
        chunks: how many chunks the plan has.

    Raises:
        ConfigError: the description is missing, malformed, or does not fit the plan.
    """
    values = os.environ if environment is None else environment
    text = values.get(VARIABLE)
    if not text:
        raise ConfigError(
            f"runtime='processes' needs {VARIABLE} in the environment; start the script with "
            f"`python -m tflms local-run --chunks {chunks} script.py`, or set it to {_EXAMPLE}"
        )
    try:
        data = json.loads(text)
        addresses = tuple(str(entry) for entry in data["cluster"]["chunk"])
        index = data["task"]["index"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{VARIABLE} is malformed ({error!r}); it looks like {_EXAMPLE}"
        ) from None
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"{VARIABLE} lists {address!r}; write host:port")
    if len(set(addresses)) != len(addresses):
        raise ConfigError(f"{VARIABLE} lists one address twice; each chunk needs its own")
    if len(addresses) != chunks:
        raise ConfigError(
            f"{VARIABLE} lists {len(addresses)} processes, the plan has {chunks} chunks; "
            "make both the same"
        )
    if not isinstance(index, int) or not 0 <= index < len(addresses):
        raise ConfigError(f"{VARIABLE} gives task index {index!r}; use 0 to {len(addresses) - 1}")
    secret = values.get(SECRET_VARIABLE, "")
    if len(secret) < 16:
        raise ConfigError(
            f"{SECRET_VARIABLE} must hold the run's secret, 16 characters or more and the same in "
            "every process, so that no stranger can push into the queues"
        )
    return Cluster(addresses, index, secret)
