"""Bytes as people write them ("8GiB", "512 MB") and as numbers."""

from __future__ import annotations

import re

from tflms.errors import ConfigError

_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return the number of bytes that a text such as ``"8GiB"`` or ``"512 MB"`` stands for.

    Raises:
        ConfigError: the text is not a number with a known unit.
    """
    match = _TEXT.fullmatch(text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        units = ", ".join(["B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"])
        raise ConfigError(f"{text!r} is no size; write a number and a unit out of {units}")
    return int(float(match.group(1)) * factor)


def format_bytes(nbytes: float) -> str:
    """Return bytes as people read them, in decimal units (``"166.9 MB"``)."""
    sign = "-" if nbytes < 0 else ""
    rest = abs(float(nbytes))
    for unit in ("B", "kB", "MB", "GB"):
        if rest < 1000:
            return f"{sign}{rest:.0f} B" if unit == "B" else f"{sign}{rest:.1f} {unit}"
        rest /= 1000
    return f"{sign}{rest:.1f} TB"


def format_seconds(seconds: float) -> str:
    """Return a duration as people read it (``"12.3 ms"``)."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"
