"""How a field of the schema is declared."""

from dataclasses import field
from typing import Any


def setting(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    flag: str = "",
) -> Any:
    """A field with its help line, its limits (inclusive), and its flag unless that is its name."""
    return field(
        default=default,
        metadata={"help": help, "low": low, "high": high, "choices": choices, "flag": flag},
    )
