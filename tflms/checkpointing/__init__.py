"""Optimal checkpointing of chains: what to keep, what to compute again, under a memory limit."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tflms import installed
from tflms.checkpointing.chain import Chain
from tflms.checkpointing.operations import Held, Item, Kind, Operation, Replay, Step, replay
from tflms.checkpointing.optimal import (
    DropInputs,
    drop_inputs,
    minimum_memory,
    optimal_schedule,
    revolve_heterogeneous,
)
from tflms.checkpointing.revolve import revolve
from tflms.checkpointing.rivals import best_periodic, periodic, recompute_all, save_all, sqrt_n
from tflms.checkpointing.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    measure_chain: Callable[..., Any]

__all__ = [
    "Chain",
    "DropInputs",
    "Held",
    "Item",
    "Kind",
    "Operation",
    "Replay",
    "Schedule",
    "Step",
    "best_periodic",
    "drop_inputs",
    "measure_chain",
    "minimum_memory",
    "optimal_schedule",
    "periodic",
    "recompute_all",
    "replay",
    "revolve",
    "revolve_heterogeneous",
    "save_all",
    "sqrt_n",
]


def __getattr__(name: str) -> Any:
    if name == "measure_chain":  # it traces a step, which needs TensorFlow
        installed.require_tensorflow()
        return importlib.import_module("tflms.runtime.chains").measure_chain
    raise AttributeError(f"module 'tflms.checkpointing' has no attribute {name!r}")
