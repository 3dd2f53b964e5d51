"""Local parallelism: networks cut into chunks that train by their own losses."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tflms.local_updates.callbacks import LocalCheckpoint as LocalCheckpoint
    from tflms.local_updates.failure import ChunkError as ChunkError
    from tflms.local_updates.heads import make_head as make_head
    from tflms.local_updates.plan import SplitPlan as SplitPlan
    from tflms.local_updates.splitting import split as split
    from tflms.local_updates.trainer import LocalTrainer as LocalTrainer

# Imported when first asked for: `local-run` starts without TensorFlow.
_LAZY = {
    "ChunkError": "failure",
    "LocalCheckpoint": "callbacks",
    "LocalTrainer": "trainer",
    "SplitPlan": "plan",
    "make_head": "heads",
    "split": "splitting",
}
_MODULES = ("compare", "cost", "pipeline", "study")
__all__ = ["ChunkError", "LocalCheckpoint", "LocalTrainer", "SplitPlan", "make_head", "split"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"tflms.local_updates.{_LAZY[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"tflms.local_updates.{name}")
    raise AttributeError(f"module 'tflms.local_updates' has no attribute {name!r}")
