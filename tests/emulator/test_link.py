"""Link rates and presets, as values."""

from __future__ import annotations

import math

import pytest

from tflms.emulator import PRESETS, Link
from tflms.errors import ConfigError


def test_zero_and_none_both_mean_no_limit() -> None:
    assert Link(to_host=0, to_device=None) == Link()


def test_moving_everything_once_takes_the_ratio_of_a_step() -> None:
    link = Link.from_ratio(0.6, activation_bytes=300e6, step_seconds=2.0)
    assert link.to_host == link.to_device
    assert link.to_host is not None
    assert math.isclose(300e6 / link.to_host, 0.6 * 2.0)


def test_pcie_presets_are_slower_than_nvlink_by_their_ratios() -> None:
    links = {
        name: Link.preset(name, activation_bytes=1e9, step_seconds=1.0) for name in sorted(PRESETS)
    }
    nvlink, pcie = links["p100-nvlink"].to_host, links["p100-pcie3"].to_host
    assert nvlink is not None and pcie is not None
    assert math.isclose(nvlink / pcie, 1.7 / 0.6)


@pytest.mark.parametrize(
    ("text", "rate"), [("2GB/s", 2e9), ("64 MiB / s", 64 * 2**20), ("unlimited", None)]
)
def test_texts_name_rates(text: str, rate: float | None) -> None:
    assert Link.parse(text) == Link(to_host=rate, to_device=rate)


def test_a_preset_without_the_workload_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"Link\.preset\('p100-nvlink', activation_bytes="):
        Link.parse("p100-nvlink")


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="p100-nvlink, p100-pcie3"):
        Link.preset("v100", activation_bytes=1, step_seconds=1)


@pytest.mark.parametrize("text", ["fast", "2GB", "2 parsecs/s", "/s"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Link.parse(text)


@pytest.mark.parametrize("rate", [-1, math.nan, math.inf, "1GB/s", True])
def test_rates_that_are_no_rates_are_refused(rate: object) -> None:
    with pytest.raises(ConfigError, match="to_host"):
        Link(to_host=rate)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ratio", "activation_bytes", "step_seconds"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, "x"])
def test_a_ratio_needs_positive_figures(name: str, value: object) -> None:
    figures = {"ratio": 0.6, "activation_bytes": 1e6, "step_seconds": 0.1, name: value}
    with pytest.raises(ConfigError, match=name):
        Link.from_ratio(**figures)  # type: ignore[arg-type]
