"""Sizes as people read them, and as flags take them."""

from collections.abc import Iterator
from itertools import product

_BINARY = ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"))
_DECIMAL = [(10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")]
_NAMES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(num_bytes: int) -> str:
    """Three figures and a binary unit: "93.8 MiB"; whole bytes below 1 KiB."""
    value, unit = float(abs(num_bytes)), 0
    # Carried over where rounding would show 1024 of a unit.
    while value >= 1023.5 and unit < len(_NAMES) - 1:
        value, unit = value / 1024, unit + 1
    if unit == 0 or value >= 99.95:
        text = f"{value:.0f}"
    else:
        text = f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    sign = "-" if num_bytes < 0 else ""
    return f"{sign}{text} {_NAMES[unit]}"


def size_text(low: int, high: int | None = None) -> str:
    """The shortest size from `low` to `high` that a setting takes: "1.5GiB". Without `high` it is
    `low` exactly: "1GB", if need be in bytes.
    """
    if high is None:
        return min(_exact(low), key=len)
    for (power, unit), num_digits in product(_BINARY, range(4)):
        # A unit of which it is less than one reads badly.
        if 1 << power > high:
            continue
        value = -(-low * 10**num_digits >> power)
        if value << power <= high * 10**num_digits:
            return f"{value / 10**num_digits:.{num_digits}f}{unit}"
    return str(low)


def _exact(num_bytes: int) -> Iterator[str]:
    scales = [(1 << power, unit) for power, unit in _BINARY] + _DECIMAL
    for (scale, unit), num_digits in product(scales, range(4)):
        if num_bytes >= scale and num_bytes * 10**num_digits % scale == 0:
            yield f"{num_bytes / scale:.{num_digits}f}{unit}"
    yield str(num_bytes)


def counted(number: int, noun: str) -> str:
    """1 thread, 2 threads."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
