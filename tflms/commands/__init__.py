"""The commands of ``python -m tflms``: each module adds its arguments and runs."""

from __future__ import annotations
