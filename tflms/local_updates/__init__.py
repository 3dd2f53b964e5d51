"""Local parallelism: networks cut into chunks that train by their own losses."""

from __future__ import annotations

from tflms.local_updates.callbacks import LocalCheckpoint
from tflms.local_updates.failure import ChunkError
from tflms.local_updates.heads import make_head
from tflms.local_updates.plan import SplitPlan
from tflms.local_updates.split import split
from tflms.local_updates.trainer import LocalTrainer

__all__ = ["ChunkError", "LocalCheckpoint", "LocalTrainer", "SplitPlan", "make_head", "split"]
