"""The schema as a flat list: what each setting is called in a file, in the environment and as a
flag, and how a raw value becomes one of its type.

Decides which values a setting may have; refuses to know where a value comes from.
"""

import math
import re
import reprlib
from dataclasses import Field, dataclass, fields
from typing import Any, Final, get_origin

from headrace.core.base.names import find_control
from headrace.core.config.schema import Config
from headrace.core.config.units import size_text

_UNITS: Final = {
    unit + suffix: scale
    for unit, scale in {
        "": 1,
        "k": 10**3,
        "m": 10**6,
        "g": 10**9,
        "t": 10**12,
        "ki": 1 << 10,
        "mi": 1 << 20,
        "gi": 1 << 30,
        "ti": 1 << 40,
    }.items()
    for suffix in ("", "b")
}
_SIZE = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+]?[0-9]+)?)\s*([a-zA-Z]*)")
_REPR = reprlib.Repr()  # which a value of any depth does not overcome
_REPR.maxstring = 60
_KINDS: Final = {int: "any number", float: "any number", str: "a text", tuple: "texts"}
_TRUE: Final = ("true", "yes", "on", "1")
_FALSE: Final = ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of the schema."""

    section: str
    name: str
    type: type
    default: object
    help: str
    low: float | None
    high: float | None
    choices: tuple[str, ...]
    flag: str  # as "--step-tokens"

    @property
    def key(self) -> str:
        """As in a file and in messages: "scheduler.step_tokens"."""
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """As in the environment: "HEADRACE_SCHEDULER_STEP_TOKENS"."""
        return f"HEADRACE_{self.section}_{self.name}".upper()

    @property
    def is_size(self) -> bool:
        return self.name.endswith("_bytes")

    @property
    def limits(self) -> str:
        """The values it may have, for people: "1..65536", "native | torch", "a text"."""
        if self.choices:
            return " | ".join(self.choices)
        if self.type is bool:
            return "true | false"
        if self.low is None and self.high is None:
            return _KINDS[self.type]
        low, high = (
            self._spell(limit) if limit is not None else "" for limit in (self.low, self.high)
        )
        return f"{low}..{high}"

    def parse(self, raw: object) -> object:
        """The value that `raw` means: a text in any type's spelling, or a value of the type.

        ValueError, with the end of a sentence that begins with the setting's name, where it means
        none or one outside the limits.
        """
        if isinstance(raw, str) and self.type is not str:
            value = self._read(raw.strip())
        else:
            value = self._take(raw)
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and (fault := find_control(text)):
                raise ValueError(fault)  # without the text, which may be secret
        if self.choices and value not in self.choices:
            raise ValueError(f"is {_cut(repr(value))}; choose one of {', '.join(self.choices)}")
        if self.low is not None and value < self.low:  # type: ignore[operator]
            raise ValueError(f"is {_cut(str(raw))}, the least is {self._spell(self.low)}")
        if self.high is not None and value > self.high:  # type: ignore[operator]
            raise ValueError(f"is {_cut(str(raw))}, the most is {self._spell(self.high)}")
        return value

    def _spell(self, limit: float) -> str:
        return size_text(int(limit)) if self.is_size else _plain(limit)

    def _read(self, text: str) -> object:
        if self.type is bool:
            if text.lower() in _TRUE + _FALSE:
                return text.lower() in _TRUE
        elif self.type is tuple:
            return tuple(text.replace(",", " ").split())
        elif self.is_size:
            match = _SIZE.fullmatch(text)
            if match is not None and match[2].lower() in _UNITS:
                return _size(match[1], _UNITS[match[2].lower()])
        else:
            try:
                return self._take(int(text))
            except ValueError:
                pass
            try:
                return self._take(float(text))
            except ValueError:
                pass
        raise self._fault(text)

    def _take(self, raw: object) -> object:
        if self.type is float and isinstance(raw, int | float) and not isinstance(raw, bool):
            # An int of any length has a value, but perhaps none that a float can hold.
            if -(2**1000) < raw < 2**1000:
                return float(raw)
        elif self.type is int and isinstance(raw, float) and raw.is_integer():
            return int(raw)
        elif self.type is tuple and isinstance(raw, list | tuple):
            if all(isinstance(item, str) for item in raw):
                return tuple(raw)
        elif type(raw) is self.type:
            return raw
        raise self._fault(raw)

    def _fault(self, raw: object) -> ValueError:
        wanted = {
            bool: "true or false",
            int: "a size such as 512MiB" if self.is_size else "a whole number",
            float: "a number",
            str: "a text",
            tuple: "texts",
        }[self.type]
        return ValueError(f"is {_cut(_REPR.repr(raw))}, not {wanted}")


def _size(number: str, scale: int) -> int:
    """Whole numbers stay exact; an exponent that no memory has is cut before it costs any."""
    if number.replace("_", "").isdigit():
        return int(number) * scale
    value = float(number) * scale
    return round(value) if math.isfinite(value) else 1 << 100


def _cut(text: str) -> str:
    """Messages stay readable, whatever was written."""
    return text if len(text) <= 60 else text[:57] + "..."


def _plain(limit: float) -> str:
    return str(int(limit)) if float(limit).is_integer() else str(limit)


def _setting(section: str, field: "Field[Any]") -> Setting:
    facts = dict(field.metadata)
    flag = facts.pop("flag") or "--" + field.name.replace("_", "-")
    kind = get_origin(field.type) or field.type
    assert isinstance(kind, type)
    return Setting(
        section=section,
        name=field.name,
        type=kind,
        default=field.default,
        flag=flag,
        **facts,
    )


SECTIONS: Final = tuple(section.name for section in fields(Config))

SETTINGS: Final = {
    setting.key: setting
    for section in fields(Config)
    for setting in (_setting(section.name, field) for field in fields(section.default))  # type: ignore[arg-type]
}
"""Every setting by its key, in the order of the schema."""
