"""Saves and restores what decides how training goes on: one file per chunk and a manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tflms.errors import ConfigError
from tflms.local_updates.stage import Stage

_MANIFEST = "local_updates.json"


def save_stage(stage: Stage, path: str | Path, *, facts: dict[str, Any]) -> None:
    """Write one chunk's weights, states, optimizer and metrics, and when that was.

    The file appears whole or not at all.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {f"v{index}": np.asarray(v) for index, v in enumerate(stage.variables())}
    arrays |= {f"m{index}": np.asarray(v) for index, v in enumerate(stage.metric_variables())}
    arrays = {name: _storable(array) for name, array in arrays.items()}
    target = folder / f"chunk_{stage.index}.npz"
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    with partial.open("wb") as file:
        np.savez(file, allow_pickle=False, batch=facts["batch"], **arrays)
    partial.replace(target)


def write_manifest(
    path: str | Path, *, digest: str, chunks: int, epoch: int, batch_in_epoch: int, batch: int
) -> None:
    """Write the manifest; it is the last file of a checkpoint and marks it as complete."""
    facts = {
        "digest": digest,
        "chunks": chunks,
        "epoch": epoch,
        "batch_in_epoch": batch_in_epoch,
        "batch": batch,
    }
    target = Path(path) / _MANIFEST
    partial = target.with_suffix(".tmp")
    partial.write_text(json.dumps(facts, indent=1))
    partial.replace(target)


def restore(stages: Sequence[Stage], path: str | Path, *, digest: str) -> dict[str, Any]:
    """Restore the chunks from a checkpoint and return its manifest.

    Raises:
        ConfigError: there is no complete checkpoint, or it belongs to another plan.
    """
    folder = Path(path)
    manifest = folder / _MANIFEST
    if not manifest.exists():
        raise ConfigError(f"{folder} holds no complete checkpoint ({_MANIFEST} is missing)")
    facts: dict[str, Any] = json.loads(manifest.read_text())
    if facts["digest"] != digest:
        raise ConfigError(
            f"the checkpoint in {folder} is of another model or split ({facts['digest']}, here "
            f"{digest}); split the model as it was split then"
        )
    for stage in stages:
        with np.load(folder / f"chunk_{stage.index}.npz") as file:
            if int(file["batch"]) != facts["batch"]:
                raise ConfigError(
                    f"{folder}: chunk {stage.index} was saved at batch {int(file['batch'])}, the "
                    f"manifest says {facts['batch']}; use another checkpoint"
                )
            variables = stage.variables()
            names = [name for name in file.files if name.startswith("v")]
            if len(names) != len(variables):
                raise ConfigError(
                    f"{folder}: chunk {stage.index} has {len(names)} values for "
                    f"{len(variables)} variables; compile() with the optimizer and metrics of then"
                )
            for index, variable in enumerate(variables):
                variable.assign(_restored(file[f"v{index}"], variable))
            sums = [name for name in file.files if name.startswith("m")]
            stage.kept_metrics = [file[f"m{index}"] for index in range(len(sums))]
    return facts


def _storable(array: np.ndarray) -> np.ndarray:
    """Return an array that numpy can store: bfloat16 and its like go as raw bytes."""
    if array.dtype.kind in "biufSU":
        return array
    return np.frombuffer(array.tobytes(), np.uint8)


def _restored(array: np.ndarray, variable: Any) -> Any:
    like = np.asarray(variable)
    if array.dtype == like.dtype:
        return array.reshape(like.shape)
    return np.frombuffer(array.tobytes(), like.dtype).reshape(like.shape)
