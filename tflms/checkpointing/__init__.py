"""Optimal checkpointing of chains: what to keep, what to compute again, under a memory limit."""

from __future__ import annotations

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
