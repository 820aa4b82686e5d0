"""Typed, bounded reading of what a model file says about itself: GGUF metadata and JSON configs
alike.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from headrace.core.base.errors import ConfigError

_REQUIRED = object()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Faults of what is built from the contents of `path` name it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", hint=error.hint, **error.data) from None


class Facts:
    """Named values from `path`. Each reader returns a value of its type within its limits, or
    raises ConfigError.

    A key that is absent, or null, has its default; without a default it is a fault.
    """

    def __init__(self, path: Path, values: Mapping[str, object]) -> None:
        self.path = path
        self._values = values

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def integer(
        self, key: str, default: object = _REQUIRED, *, low: int = 1, high: int = 1 << 31
    ) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._fault(key, value, "a whole number")
        if not low <= value <= high:
            raise self._fault(key, value, f"a number from {low} to {high}")
        return value

    def number(
        self, key: str, default: object = _REQUIRED, *, low: float = 1e-12, high: float = 1e12
    ) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._fault(key, value, "a number")
        if not (math.isfinite(value) and low <= value <= high):
            raise self._fault(key, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def text(self, key: str, default: object = _REQUIRED) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._fault(key, value, "a text")
        return value

    def flag(self, key: str, default: object = _REQUIRED) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._fault(key, value, "true or false")
        return value

    def table(self, key: str) -> "Facts | None":
        """A nested object, None where there is none."""
        value = self._get(key, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._fault(key, value, "an object")
        return Facts(self.path, value)

    def texts(self, key: str) -> Sequence[str]:
        """A list of texts, empty where there is none."""
        value = self._get(key, ())
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise self._fault(key, value, "a list of texts")
        return value

    def numbers(self, key: str) -> Sequence[float]:
        """A list of numbers, empty where there is none."""
        value = self._get(key, ())
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self._fault(key, value, "a list of numbers")
        if not all(isinstance(v, int | float) for v in value):
            raise self._fault(key, value, "a list of numbers")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them, empty where there is none."""
        value = self._get(key, ())
        ids = (value,) if isinstance(value, int) else value
        if not isinstance(ids, list | tuple):
            raise self._fault(key, value, "a token id or a list of them")
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in ids):
            raise self._fault(key, value, "a token id or a list of them")
        return tuple(ids)

    def refuse(self, message: str, *, hint: str = "") -> ConfigError:
        return ConfigError(f"{self.path}: {message}", hint=hint)

    def _get(self, key: str, default: object) -> object:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ConfigError(f"{self.path}: {key} is missing", hint="the file is incomplete")
        return default

    def _fault(self, key: str, value: object, wanted: str) -> ConfigError:
        shown = repr(value)
        if len(shown) > 60:
            shown = shown[:57] + "..."
        return ConfigError(f"{self.path}: {key} is {shown}; {wanted} is needed")
