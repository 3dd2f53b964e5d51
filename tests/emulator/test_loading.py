"""When and how the device appears in a process, and what is said when it cannot."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.emulated import run_on_emulator
from tflms import emulator
from tflms.errors import ConfigError, EmulatorError


@pytest.fixture(scope="module")
def early() -> Any:
    """A process that asks TensorFlow for its hardware and runs a session before it loads."""
    return run_on_emulator(
        """
        result = {"before": [d.device_type for d in tf.config.list_physical_devices()]}
        graph = tf.Graph()
        with graph.as_default():
            doubled = tf.ones([3]) * 2
        with v1.Session(graph=graph) as session:
            session.run(doubled)
        result["loaded before"] = emulator.is_loaded()

        emulator.load("20MB", link="1GB/s")
        result["after"] = [d.name for d in tf.config.list_physical_devices("EMU")]
        result["logical"] = [d.name for d in tf.config.list_logical_devices("EMU")]
        result["limit"] = emulator.stats().limit_bytes
        result["device"] = emulator.device

        emulator.load(20_000_000)
        try:
            emulator.load("30MB")
        except emulator_error as error:
            result["another size"] = str(error)

        result["eager"] = tf.ones([3]).device
        with v1.Session(graph=graph) as session:
            result["session"] = [d.name for d in session.list_devices()]
        hidden = v1.ConfigProto(device_count={"EMU": 0})
        with v1.Session(graph=graph, config=hidden) as session:
            result["hidden"] = [d.name for d in session.list_devices()]
        emulator.reset_stats()
        tf.ones([8]) + 1.0
        result["tensorflow's own"] = tf.config.experimental.get_memory_info("EMU:0")
        result["peak"] = emulator.stats().peak_bytes
        """.replace("emulator_error", "__import__('tflms').errors.EmulatorError"),
        memory_bytes=None,
    )


def test_it_joins_devices_that_were_listed_before(early: Any) -> None:
    assert early["before"] == ["CPU"]
    assert not early["loaded before"]
    assert early["after"] == ["/physical_device:EMU:0"]
    assert early["logical"] == [early["device"]] == ["/device:EMU:0"]


def test_the_memory_is_what_was_asked_for(early: Any) -> None:
    assert early["limit"] == 20_000_000


def test_loading_again_needs_the_same_memory(early: Any) -> None:
    assert "20000000" in early["another size"] and "30000000" in early["another size"]


def test_ops_without_a_device_go_to_it(early: Any) -> None:
    assert early["eager"].endswith("/device:EMU:0")


def test_a_session_can_do_without_it(early: Any) -> None:
    assert [name.split("device:")[1] for name in early["session"]] == ["CPU:0", "EMU:0"]
    assert [name.split("device:")[1] for name in early["hidden"]] == ["CPU:0"]


def test_tensorflow_reports_the_same_peak(early: Any) -> None:
    assert early["tensorflow's own"]["peak"] == early["peak"] > 0


def test_loading_after_tensorflow_made_its_devices_is_refused() -> None:
    message = run_on_emulator(
        """
        from tflms.errors import EmulatorError
        tf.ones([1])
        try:
            emulator.load("20MB")
        except EmulatorError as error:
            result = str(error)
        """,
        memory_bytes=None,
    )
    assert "made its devices already" in message
    assert "before the first eager operation" in message


@pytest.mark.parametrize("size", [0, -5, 2**60, 1.5, True, None])
def test_sizes_that_are_no_sizes_are_refused(size: object) -> None:
    with pytest.raises(ConfigError, match="memory_bytes"):
        emulator.load(size)  # type: ignore[arg-type]


def test_texts_that_are_no_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="lots"):
        emulator.load("lots")


def test_links_that_are_no_links_are_refused() -> None:
    with pytest.raises(ConfigError, match="link=5"):
        emulator.load("20MB", link=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", [emulator.stats, emulator.reset_stats, emulator.set_link])
def test_nothing_can_be_asked_before_it_is_loaded(call: Any) -> None:
    assert not emulator.is_loaded()
    with pytest.raises(EmulatorError, match="not loaded"):
        call()


def test_a_link_and_rates_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="not both"):
        emulator.set_link(emulator.Link(), to_host=1.0)


def test_code_that_fails_on_the_emulator_shows_what_it_wrote() -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_on_emulator("1 / 0", memory_bytes=None)
