"""Sizes as people read them."""

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
