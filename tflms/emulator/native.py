"""The C interface of the built library, opened and checked against the running TensorFlow."""

from __future__ import annotations

import ctypes
from pathlib import Path

import tensorflow as tf

from tflms.emulator.build import built_library
from tflms.errors import EmulatorError


class NativeStatistics(ctypes.Structure):
    """Mirror of ``struct tflms_emu_statistics`` in device.cc."""

    _fields_ = (
        ("bytes_in_use", ctypes.c_int64),
        ("peak_bytes", ctypes.c_int64),
        ("limit_bytes", ctypes.c_int64),
        ("to_host_bytes", ctypes.c_int64),
        ("to_device_bytes", ctypes.c_int64),
        ("to_host_copies", ctypes.c_int64),
        ("to_device_copies", ctypes.c_int64),
        ("to_host_seconds", ctypes.c_double),
        ("to_device_seconds", ctypes.c_double),
    )


class NativeDevice:
    """The library of the emulated accelerator in this process."""

    def __init__(self) -> None:
        path = built_library()
        self._library = _open(path)
        self._declare()
        self._check(path)

    def start(self, memory_bytes: int) -> None:
        """Register device and kernels; only the first call of a process succeeds."""
        if self._library.tflms_emu_start(memory_bytes) <= 0:
            raise EmulatorError("the emulated accelerator has been started in this process already")

    def set_link(self, to_host: float, to_device: float) -> None:
        """Set the rates in bytes per second; 0 is no limit."""
        self._library.tflms_emu_set_link(to_host, to_device)

    def statistics(self) -> NativeStatistics:
        """Return the counters as they are now."""
        out = NativeStatistics()
        self._library.tflms_emu_statistics_now(ctypes.byref(out))
        return out

    def reset_statistics(self) -> None:
        """Let the peak fall to what is in use; set the counters of the copy engines to zero."""
        self._library.tflms_emu_reset_statistics()

    def _declare(self) -> None:
        library = self._library
        library.tflms_emu_tensorflow_version.restype = ctypes.c_char_p
        library.tflms_emu_graph_def_version.restype = ctypes.c_int
        library.tflms_emu_start.argtypes = [ctypes.c_int64]
        library.tflms_emu_start.restype = ctypes.c_int
        library.tflms_emu_set_link.argtypes = [ctypes.c_double, ctypes.c_double]
        library.tflms_emu_set_link.restype = None
        library.tflms_emu_statistics_now.argtypes = [ctypes.POINTER(NativeStatistics)]
        library.tflms_emu_statistics_now.restype = None
        library.tflms_emu_reset_statistics.restype = None

    def _check(self, path: Path) -> None:
        built_for = self._library.tflms_emu_tensorflow_version().decode()
        headers = self._library.tflms_emu_graph_def_version()
        if built_for != tf.__version__ or headers != tf.version.GRAPH_DEF_VERSION:
            raise EmulatorError(
                f"{path} was built for TensorFlow {built_for} (graph version {headers}), but "
                f"TensorFlow {tf.__version__} (graph version {tf.version.GRAPH_DEF_VERSION}) is "
                "running; delete that file, and install TensorFlow again if its headers are stale"
            )


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise EmulatorError(
            f"the emulated accelerator was built but cannot be opened: {error}. The compiler's "
            "C++ interface differs from TensorFlow's; install g++ (GCC 9 or newer) and TensorFlow "
            "from its wheel"
        ) from error
