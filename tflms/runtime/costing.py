"""Decides what a plan is judged by: estimated costs, measured ones, or those of a file."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tflms.config import Config
from tflms.emulator import accelerator
from tflms.errors import ConfigError, TflmsError
from tflms.graph.order import Phases
from tflms.planning.cost import Costs, Rates, Sizes, static_costs, typical_rates
from tflms.runtime import read as reading
from tflms.runtime.measure import measure_costs
from tflms.runtime.placement import default_kind
from tflms.runtime.read import ReadGraph
from tflms.runtime.rehearsal import Rehearsal, rehearse

_log = logging.getLogger(__name__)
AS_IT_IS = "measured, on the step as it is, with made-up data"
RELIEVED = "measured, on the step with all swapped that chain_rule can swap, with made-up data"


def costs_for(
    read: ReadGraph,
    config: Config,
    weights: Sizes,
    phases: Phases,
    *,
    fits: bool,
    relieve: Callable[[Any, Config, list[Any]], Any],
) -> Costs:
    """Return the costs that ``cost`` asks for.

    Args:
        read: the user's graph; it is only looked at.
        config: ``cost`` and ``batch_size``.
        weights: sizes of its values.
        phases: which operations a step runs.
        fits: whether the step is expected to fit in the device as it is.
        relieve: rewrites a copy of the step, given a config and what it fetches.

    Raises:
        ConfigError: the file cannot be used, or the step cannot be measured.
    """
    if config.cost == "static":
        return static_costs(read.graph, weights, device_rates(weights.kind or default_kind()))
    if config.cost != "measured":
        return Costs.load(config.cost, ops=read.graph.original_ops)
    for relieved in (False, True):
        if fits or relieved:
            try:
                return _measured(read, config, weights, phases, relieve if relieved else None)
            except tf.errors.ResourceExhaustedError:
                _log.info("the step does not fit in the device, relieved: %s", relieved)
            except tf.errors.OpError as error:
                raise ConfigError(
                    "cost='measured' cannot run this step apart, with made-up data: "
                    f"{str(error)[:300]}; cost='static' estimates the times instead"
                ) from error
    raise ConfigError(
        "cost='measured' runs the step once before it is planned, and it does not fit in the "
        "device even with all swapped that chain_rule can swap; use cost='static', or measure on a "
        "larger device and pass the file that Costs.save() wrote"
    )


def _measured(
    read: ReadGraph,
    config: Config,
    weights: Sizes,
    phases: Phases,
    relieve: Callable[[Any, Config, list[Any]], Any] | None,
) -> Costs:
    """Run a copy of the step and bring its costs to the operations of the user's graph."""
    copy = rehearse(read, phases, config.batch_size)
    if relieve is not None:
        _relieved(copy, config, relieve)
    kind = weights.kind or default_kind()
    found = measure_costs(
        copy.graph, fetches=copy.fetches, feeds=copy.feeds, init=copy.init, device=config.device,
        link_device=f"{kind}:0",
    )  # fmt: skip
    other = reading.read(copy.graph).graph
    seconds, workspace = [0.0] * read.graph.original_ops, [0] * read.graph.original_ops
    for number in range(read.graph.original_ops):
        op = read.graph.op(number)
        twin = other.find(op.name)
        if twin is not None and weights.on_device[number]:
            seconds[number], workspace[number] = found.seconds[twin], found.workspace[twin]
    return dataclasses.replace(
        found, seconds=tuple(seconds), workspace=tuple(workspace),
        source=AS_IT_IS if relieve is None else RELIEVED,
    )  # fmt: skip


def _relieved(
    copy: Rehearsal, config: Config, relieve: Callable[[Any, Config, list[Any]], Any]
) -> None:
    settings = Config(
        strategy="chain_rule", swap_branches=True, min_swap_bytes=config.min_swap_bytes,
        device=config.device, host_device=config.host_device, batch_size=config.batch_size,
    )  # fmt: skip
    try:
        relieve(copy.graph, settings, copy.fetches)
    except TflmsError as error:
        raise ConfigError(
            f"cost='measured' has to relieve a copy of the step, and that fails: {error}; "
            "cost='static' estimates the times instead"
        ) from error


def device_rates(kind: str) -> Rates:
    """Return the rates that estimates go by; the emulated device's link is known as it is set."""
    rates = typical_rates(kind)
    if kind != "EMU" or not accelerator.is_loaded():
        return rates
    link = accelerator.link()
    return dataclasses.replace(
        rates,
        to_host=min(link.to_host or rates.to_host, rates.to_host),
        to_device=min(link.to_device or rates.to_device, rates.to_device),
    )
