"""Runs jobs in child processes, one after another, and collects what they tell."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tflms.commands.job import Job, Outcome
from tflms.errors import TflmsError

_ROOT = Path(__file__).resolve().parents[2]
_TAIL = 4000  # characters of a child's standard error that are shown when it fails


def run_job(
    job: Job,
    *,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    timeout_seconds: float = 1800,
) -> Outcome:
    """Do a job in a process of its own and return its outcome.

    Args:
        job: what to train.
        on_event: called with each event on the way: ``{"event": "built"}``, then
            ``{"event": "step", "loss": ...}`` per step.
        timeout_seconds: the child is ended after this long.

    Raises:
        TflmsError: the child failed, for another reason than the device's memory, or took too long.
    """
    outcome: Outcome | None = None
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        child = subprocess.Popen(
            [sys.executable, "-m", "tflms.commands.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env=environment(),
        )
        too_long = threading.Timer(timeout_seconds, child.kill)
        too_long.start()
        try:
            assert child.stdin is not None and child.stdout is not None
            with child.stdin:
                json.dump(dataclasses.asdict(job), child.stdin)
            for line in child.stdout:
                event = _event(line)
                if event.get("event") == "outcome":
                    outcome = Outcome.from_dict({k: v for k, v in event.items() if k != "event"})
                elif event and on_event is not None:
                    on_event(event)
            child.wait()
        except BrokenPipeError:
            child.wait()  # it ended before it had read the job; its complaint says why
        finally:
            too_long.cancel()
            child.kill()
            child.wait()
        if child.returncode != 0 or outcome is None:
            complaints.seek(0)
            raise TflmsError(
                f"training {job.model} in a process of its own failed (exit {child.returncode}, "
                f"limit {timeout_seconds:.0f} s); it wrote:\n{complaints.read()[-_TAIL:]}"
            )
    return outcome


def ask(
    module: str, job: Mapping[str, Any], *, subject: str, key: str, timeout_seconds: float
) -> dict[str, Any]:
    """Run a module of the package on a job in a process of its own, and return what it tells.

    Args:
        module: reads the job as JSON and writes its result as one line of JSON.
        job: what it is to do.
        subject: what failed, if it fails.
        key: the first key of the result.
        timeout_seconds: the process is ended after this long.

    Raises:
        TflmsError: the process failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        env=environment(),
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(f'{{"{key}"')]
    if done.returncode or not lines:
        raise TflmsError(f"{subject} failed; it wrote:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def environment() -> dict[str, str]:
    """The environment of a child, in which the package that runs now is found."""
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "PYTHONPATH": path}


def _event(line: str) -> dict[str, Any]:
    """Return a line as an event; libraries may write lines of their own, which are none."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) and "event" in event else {}
