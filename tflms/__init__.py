"""Train TensorFlow models that do not fit in the accelerator's memory, with the same numbers."""

from __future__ import annotations
