"""Train TensorFlow models that do not fit in the accelerator's memory, with the same numbers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tflms import installed
from tflms.config import Config
from tflms.errors import (
    ConfigError,
    EmulatorError,
    GraphError,
    HandBackError,
    InfeasibleError,
    InvariantError,
    RuleError,
    TflmsError,
)
from tflms.planning.plan import Plan
from tflms.report import Report

if TYPE_CHECKING:
    from tflms.runtime.function import enabled as enabled
    from tflms.runtime.function import function as function
    from tflms.runtime.function import last_reports as last_reports
    from tflms.runtime.plan_api import plan as plan
    from tflms.runtime.plan_api import tune as tune
    from tflms.runtime.rewrite import rewrite as rewrite

__version__ = "0.1.0"
# What needs TensorFlow is imported when it is first asked for: the package itself is not slow.
_LAZY = {
    "enabled": "tflms.runtime.function",
    "function": "tflms.runtime.function",
    "last_reports": "tflms.runtime.function",
    "plan": "tflms.runtime.plan_api",
    "rewrite": "tflms.runtime.rewrite",
    "tune": "tflms.runtime.plan_api",
}
_NEED_TENSORFLOW = ("emulator", "keras", "local_updates")
_MODULES = ("checkpointing", "emulator", "keras", "local_updates")
__all__ = [
    "Config",
    "ConfigError",
    "EmulatorError",
    "GraphError",
    "HandBackError",
    "InfeasibleError",
    "InvariantError",
    "Plan",
    "Report",
    "RuleError",
    "TflmsError",
    "enabled",
    "function",
    "last_reports",
    "plan",
    "rewrite",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY or name in _NEED_TENSORFLOW:
        installed.require_tensorflow()
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"tflms.{name}")
    raise AttributeError(f"module 'tflms' has no attribute {name!r}")
