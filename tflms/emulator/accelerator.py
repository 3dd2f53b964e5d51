"""The emulated device as this process sees it: loaded once, measured and set at any time."""

from __future__ import annotations

import dataclasses
import logging
import threading

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context

from tflms.emulator.link import Link
from tflms.emulator.native import NativeDevice
from tflms.errors import ConfigError, EmulatorError
from tflms.units import format_bytes, parse_bytes

_log = logging.getLogger(__name__)

device = "/device:EMU:0"
"""What to pass to ``tf.device``."""

_SMALLEST_MEMORY_BYTES = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class Statistics:
    """What the device's allocator and its two copy engines have counted.

    Attributes:
        bytes_in_use: allocated now.
        peak_bytes: most that was allocated at once since loading or the last ``reset_stats()``.
        limit_bytes: size of the device's memory.
        to_host_bytes: moved from device to host since loading or the last ``reset_stats()``.
        to_device_bytes: moved from host to device, likewise.
        to_host_copies: number of copies from device to host.
        to_device_copies: number of copies from host to device.
        to_host_seconds: how long the engine from device to host was busy.
        to_device_seconds: how long the engine from host to device was busy.
    """

    bytes_in_use: int
    peak_bytes: int
    limit_bytes: int
    to_host_bytes: int
    to_device_bytes: int
    to_host_copies: int
    to_device_copies: int
    to_host_seconds: float
    to_device_seconds: float


class _Loaded:
    """The one emulated device of this process, or none yet."""

    lock = threading.Lock()
    native: NativeDevice | None = None
    memory_bytes: int = 0
    link: Link = Link()


def load(memory_bytes: int | str, link: Link | str | None = None) -> None:
    """Give TensorFlow the device EMU:0; ops that name no device go there, as they would to a GPU.

    Must come before TensorFlow makes its devices: before the first eager operation or session. The
    first load on a machine builds the device (about ten seconds). Loading again with the same
    memory does nothing but set the link, if one is given; memory can be changed only in a new
    process.

    Args:
        memory_bytes: size of the device's memory, bytes or a text such as ``"400MB"``.
        link: rates between host and device; ``None`` leaves them (at first: no limit). Texts:
            ``"2GB/s"``, ``"unlimited"``.

    Raises:
        ConfigError: the memory or the link is not valid.
        EmulatorError: TensorFlow has made its devices already, the device is loaded with another
            memory, or it cannot be built (the message says what to install).
    """
    nbytes = _checked_memory(memory_bytes)
    rates = Link.parse(link) if isinstance(link, str) else link
    if rates is not None and not isinstance(rates, Link):
        raise ConfigError(f"link={link!r} is neither a Link nor a text such as '2GB/s'")
    with _Loaded.lock:
        if _Loaded.native is None:
            _refuse_late_load()
            native = NativeDevice()
            native.start(nbytes)
            _leave_sums_alone()
            _announce()
            _Loaded.native, _Loaded.memory_bytes = native, nbytes
            _log.info("loaded %s with %s", device, format_bytes(nbytes))
        elif _Loaded.memory_bytes != nbytes:
            raise EmulatorError(
                f"{device} is loaded with {_Loaded.memory_bytes} bytes and cannot be given "
                f"{nbytes} in the same process; start a new one"
            )
    if rates is not None:
        set_link(rates)


def is_loaded() -> bool:
    """Return whether this process has the emulated device."""
    return _Loaded.native is not None


def stats() -> Statistics:
    """Return what allocator and copy engines have counted so far.

    Raises:
        EmulatorError: the device is not loaded.
    """
    now = _native().statistics()
    return Statistics(
        **{field.name: getattr(now, field.name) for field in dataclasses.fields(Statistics)}
    )


def reset_stats() -> None:
    """Let the peak fall to what is in use now, and count bytes, copies and seconds from zero.

    Raises:
        EmulatorError: the device is not loaded.
    """
    _native().reset_statistics()


def set_link(
    link: Link | None = None, *, to_host: float | None = None, to_device: float | None = None
) -> None:
    """Set how fast bytes move from now on: a ``Link``, or the two rates.

    Args:
        link: both rates at once; excludes the other two arguments.
        to_host: device to host, bytes per second; ``None`` or 0: no limit.
        to_device: host to device, bytes per second; ``None`` or 0: no limit.

    Raises:
        ConfigError: a rate is negative or no number, or both forms are used.
        EmulatorError: the device is not loaded.
    """
    if link is not None and not (to_host is None and to_device is None):
        raise ConfigError("set_link takes a Link or to_host and to_device, not both")
    rates = Link(to_host=to_host, to_device=to_device) if link is None else link
    _native().set_link(rates.to_host or 0.0, rates.to_device or 0.0)
    _Loaded.link = rates


def link() -> Link:
    """Return the rates of the link that were set last."""
    return _Loaded.link


def _native() -> NativeDevice:
    if _Loaded.native is None:
        raise EmulatorError(
            "the emulated accelerator is not loaded; call tflms.emulator.load(memory_bytes) before "
            "TensorFlow runs its first operation"
        )
    return _Loaded.native


def _checked_memory(memory_bytes: int | str) -> int:
    nbytes = parse_bytes(memory_bytes) if isinstance(memory_bytes, str) else memory_bytes
    if isinstance(nbytes, bool) or not isinstance(nbytes, int):
        raise ConfigError(
            f"memory_bytes={memory_bytes!r} is no size; write bytes or a text such as '400MB'"
        )
    if not _SMALLEST_MEMORY_BYTES <= nbytes < 2**50:
        raise ConfigError(
            f"memory_bytes={memory_bytes!r} is out of range; it must be at least "
            f"{_SMALLEST_MEMORY_BYTES} bytes and under 1 PiB"
        )
    return nbytes


def _refuse_late_load() -> None:
    """The eager runtime makes its devices once; what is registered later it never sees."""
    # There is no public question for this: the setters of tf.config fail by it, but also act.
    if context.context()._context_handle is not None:
        raise EmulatorError(
            "TensorFlow has made its devices already, so the emulated accelerator cannot be added; "
            "call tflms.emulator.load() at the start of the program, before the first eager "
            "operation, Keras model or session"
        )


def _leave_sums_alone() -> None:
    """Turn off Grappler's memory optimizer, which takes the device's memory for the CPU's 256 MiB.

    Where it expects a peak above four fifths of a device's memory, it turns the ``AddN`` that are
    being computed then into additions one by one, in another order: other last bits. Of a kind of
    device that it does not know, it counts everything on the CPU (virtual_cluster.cc,
    memory_optimizer.cc). ``tf.config.optimizer`` has no name for this option.
    """
    current = context.context()
    config = config_pb2.ConfigProto()
    if current._config is not None:
        config.CopyFrom(current._config)
    rewriting = config.graph_options.rewrite_options
    if rewriting.memory_optimization == rewriter_config_pb2.RewriterConfig.DEFAULT_MEM_OPT:
        rewriting.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
        current._config = config


def _announce() -> None:
    """TensorFlow may have listed its physical devices before, for example for tf.config calls."""
    if not tf.config.list_physical_devices("EMU"):
        context.context().reinitialize_physical_devices()
