"""Runs code on the emulated accelerator in a fresh process: memory is given once a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_MARK = "==> result "


def run_on_emulator(
    source_code: str,
    *,
    memory_bytes: int | str | None = "1GB",
    timeout_seconds: float = 180,
    environment: Mapping[str, str] | None = None,
    **values: Any,
) -> Any:
    """Run Python code in a new process with the emulator loaded and return its ``result``.

    The code finds ``tf``, ``v1`` (tf.compat.v1), ``np``, ``emulator`` and the extra keyword
    arguments as variables, and must set ``result`` to something that JSON can hold. Its paths
    resolve as in the test suite: ``tests`` and ``tflms`` can be imported.

    Args:
        source_code: the code; common indentation is taken off.
        memory_bytes: size of the device's memory; ``None`` leaves loading to the code.
        timeout_seconds: the process is killed after this long.
        environment: environment variables to add.
        values: variables for the code, sent as JSON.

    Raises:
        AssertionError: the code raised, ended early, ran too long or set no result; the message
            shows what it wrote.
    """
    job = {"code": textwrap.dedent(source_code), "memory_bytes": memory_bytes, "values": values}
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": path, **(environment or {})}
    try:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve())],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            env={**os.environ, **settings},
            cwd=_ROOT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        shown = _tail(error.stdout) + _tail(error.stderr)
        raise AssertionError(f"no result after {timeout_seconds} s; it wrote:\n{shown}") from None
    answers = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode != 0 or not answers:
        raise AssertionError(
            f"the process ended with {done.returncode} and {'a' if answers else 'no'} result; "
            f"it wrote:\n{_tail(done.stdout)}{_tail(done.stderr)}"
        )
    return json.loads(answers[-1][len(_MARK) :])


def _tail(output: str | bytes | None) -> str:
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return text[-6000:]


def _plain(value: Any) -> Any:
    """Let JSON hold numpy's and dataclasses' values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    if isinstance(value, bytes):
        return value.decode()
    raise TypeError(f"the result holds {type(value).__name__}, which JSON cannot hold")


def _main() -> None:
    job = json.load(sys.stdin)
    import numpy as np
    import tensorflow as tf

    from tflms import emulator

    if job["memory_bytes"] is not None:
        emulator.load(job["memory_bytes"])
    names = {
        "tf": tf,
        "v1": tf.compat.v1,
        "np": np,
        "emulator": emulator,
        "__name__": "code_on_emulator",
        **job["values"],
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "code_on_emulator.py"  # AutoGraph reads the source of functions
        file.write_text(job["code"], encoding="utf-8")
        exec(compile(job["code"], str(file), "exec"), names)
    # Written to the descriptor at once: TensorFlow's own threads may write as well.
    sys.stdout.flush()
    os.write(1, (_MARK + json.dumps(names["result"], default=_plain) + "\n").encode())


if __name__ == "__main__":
    sys.path[0] = str(_ROOT)  # instead of this file's folder
    _main()
