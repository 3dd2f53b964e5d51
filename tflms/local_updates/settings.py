"""Refuses settings of a trainer that mean nothing or do not go together."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tflms.errors import ConfigError
from tflms.local_updates.plan import SplitPlan

RUNTIMES = ("fused", "threads", "processes")


def check_plan(plan: Any, model: Any) -> None:
    """Refuse a plan that is none, or is another model's."""
    if not isinstance(plan, SplitPlan):
        raise ConfigError(f"plan={plan!r} is no plan; pass what split(model, chunks=...) returns")
    if plan.model is not model:
        raise ConfigError("plan= was made for another model; call split() with this one")


def check_settings(
    *,
    method: str,
    runtime: str,
    form: str,
    sync_every: int,
    heads: Any,
    queue_size: Any,
    timeout: Any,
) -> None:
    """Refuse what ``LocalTrainer`` does not know, see its arguments."""
    if runtime not in RUNTIMES:
        raise ConfigError(f"runtime={runtime!r} is unknown; use one of {', '.join(RUNTIMES)}")
    if not isinstance(queue_size, int) or queue_size < 1:
        raise ConfigError(f"queue_size={queue_size} is no number of batches; use 1 or more")
    if not timeout > 0:
        raise ConfigError(f"timeout={timeout} ends every run at once; use some seconds")
    if runtime != "fused" and tf.distribute.get_strategy().num_replicas_in_sync > 1:
        raise ConfigError(
            f"runtime={runtime!r} runs chunks outside of a strategy's replicas; within "
            "a distribution strategy's scope use runtime='fused'"
        )
    if form not in ("cotangent", "duplicates"):
        raise ConfigError(f"form={form!r} is unknown; use 'cotangent' or 'duplicates'")
    if form == "duplicates" and (method != "overlapping" or runtime != "fused"):
        raise ConfigError(
            "form='duplicates' is a form of method='overlapping' in runtime='fused'; the other "
            "runtimes average by form='cotangent', which needs one message per neighbour"
        )
    if sync_every < 1 or (sync_every > 1 and form != "duplicates"):
        raise ConfigError(
            f"sync_every={sync_every}: 1, or more with form='duplicates', which averages copies"
        )
    if heads == "lm_tied" and runtime != "fused":
        raise ConfigError(
            "heads='lm_tied' reads a weight that another chunk updates; only runtime='fused' "
            "has one copy at one time: use 'lm_linear' or 'lm_lowrank'"
        )
