"""Chooses the runtime behind a trainer by its name."""

from __future__ import annotations

from typing import Any

from tflms.local_updates.duplicates import DuplicatesRuntime
from tflms.local_updates.fused import FusedRuntime
from tflms.local_updates.processes import ProcessesRuntime
from tflms.local_updates.threads import ThreadsRuntime


def make_runtime(trainer: Any, name: str, *, form: str, sync_every: int) -> Any:
    """Return the runtime of that name."""
    if name == "threads":
        return ThreadsRuntime(trainer)
    if name == "processes":
        return ProcessesRuntime(trainer)
    if form == "duplicates":
        return DuplicatesRuntime(trainer, sync_every=sync_every)
    return FusedRuntime(trainer)
