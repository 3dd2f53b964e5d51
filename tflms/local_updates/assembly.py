"""Puts a plan, the windows and the heads together into stages, and names their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tflms.errors import ConfigError
from tflms.local_updates.heads import HEAD_OPTIONS, make_head
from tflms.local_updates.placement import check_devices, move_to
from tflms.local_updates.plan import SplitPlan
from tflms.local_updates.stage import Exit, Stage
from tflms.local_updates.windows import Window


def build_stages(
    plan: SplitPlan,
    windows: Sequence[Window],
    *,
    heads: Any,
    head_options: dict[str, Any],
    devices: Sequence[str] | None,
    here: bool = True,
) -> tuple[Stage, ...]:
    """Return a stage per chunk, with a head where a window ends before the last chunk.

    Args:
        plan: the plan.
        windows: the windows.
        heads: as in ``LocalTrainer``.
        head_options: as in ``LocalTrainer``.
        devices: as in ``LocalTrainer``.
        here: whether all devices are this process's.
    """
    count = len(plan.chunks)
    if devices is not None:
        check_devices(devices, chunks=count, here=here)
    unknown = sorted(set(head_options) - set(HEAD_OPTIONS))
    if unknown:
        known = ", ".join(HEAD_OPTIONS)
        raise ConfigError(f"head_options= knows {known}, not {', '.join(unknown)}")
    if isinstance(heads, (list, tuple)) and len(heads) != count - 1:
        raise ConfigError(f"heads= lists {len(heads)} heads for {count - 1} inner chunks")
    ends = {window.last for window in windows}
    stages = []
    for index, net in enumerate(plan.nets):
        exit_ = None
        if index in ends:
            head = None
            if index < count - 1:
                kind = heads[index] if isinstance(heads, (list, tuple)) else heads
                head = _head_behind(plan, index, kind, head_options)
            exit_ = Exit(head, name=f"exit_{index}")
        device = devices[index] if devices is not None else None
        mine = [window for window in windows if window.first <= index <= window.last]
        stage = Stage(index, net, exit_, mine, device=device)
        if device is not None:
            move_to(device, [*net.model.variables, *(exit_.variables if exit_ else [])])
        stages.append(stage)
    return tuple(stages)


def _head_behind(plan: SplitPlan, index: int, kind: Any, options: dict[str, Any]) -> Any:
    net = plan.nets[index]
    made = [
        net.model.outputs[position]
        for source, position in net.routes
        if source == "out" and keras.backend.is_float_dtype(net.model.outputs[position].dtype)
    ]
    if not made:
        raise ConfigError(
            f"chunk {index} hands on no float tensor that a head could read; move its cut"
        )
    output = plan.model.outputs[0]
    main = made[-1]
    if kind == "auto":
        positions = len(output.shape) == 3 and len(main.shape) == 3
        kind = "lm_linear" if positions else "pool_linear"
    return make_head(
        kind,
        main.shape,
        outputs=output,
        dtype=main.dtype,
        name=f"head_{index}",
        **options,
    )


def exits_of(stages: Sequence[Stage]) -> list[tuple[Stage, Exit]]:
    """Return the stages that have an exit, the last one first."""
    found = [(stage, stage.exit) for stage in stages if stage.exit is not None]
    return [found[-1], *found[:-1]]


def named_results(stages: Sequence[Stage], *, mode: str, ensemble: Exit | None) -> dict[str, Any]:
    """Return metric results by their public names: ``loss``, and ``loss_0`` of chunk 0's exit."""
    if mode == "ensemble" and ensemble is not None:
        return ensemble.results()
    found: dict[str, Any] = {}
    for stage, exit_ in exits_of(stages):
        last = stage is stages[-1]
        if last or mode == "all":
            for name, value in exit_.results().items():
                found[name if last else f"{name}_{stage.index}"] = value
    return found
