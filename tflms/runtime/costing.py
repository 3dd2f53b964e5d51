"""Decides what a plan is judged by: estimated costs, measured ones, or those of a file."""

from __future__ import annotations

import dataclasses

from tflms.config import Config
from tflms.emulator import accelerator
from tflms.errors import ConfigError
from tflms.graph.order import Phases
from tflms.planning.cost import Costs, Rates, Sizes, static_costs, typical_rates
from tflms.runtime.placement import default_kind
from tflms.runtime.read import ReadGraph


def costs_for(read: ReadGraph, config: Config, weights: Sizes, phases: Phases) -> Costs:
    """Return the costs that ``cost`` asks for."""
    if config.cost == "static":
        return static_costs(read.graph, weights, device_rates(weights.kind or default_kind()))
    if config.cost == "measured":
        raise ConfigError(
            "cost='measured' needs the feeds of a step, which a rewrite is not given; call "
            "tflms.runtime.measure.measure_costs(graph, fetches=, feeds=, init=).save(path) on a "
            "graph built the same way, and pass cost=path"
        )
    return Costs.load(config.cost, ops=read.graph.original_ops)


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
