"""Layers of raw values from named sources become one Config that knows where each value came from.

Decides which of several values counts; refuses to know how a source is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, NamedTuple

from headrace.core.base.errors import ConfigError
from headrace.core.config.schema import Config
from headrace.core.config.settings import SECTIONS, SETTINGS

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Layer:
    """What one source says: section -> name -> raw value, as a text or as a value of its type.

    `faults` are what was wrong in reading the source; `merge` reports them beside its own.
    """

    source: str  # "file headrace.toml", "env HEADRACE_SERVER_PORT", "flag --port"
    values: Mapping[str, Any]
    faults: Sequence[str] = field(default=())


class Merged(NamedTuple):
    config: Config
    sources: Mapping[str, str]  # key of every setting -> the source of its value


def merge(layers: Sequence[Layer]) -> Merged:
    """The defaults, overlaid by the layers in order: a later layer wins.

    Every fault of every layer is in one ConfigError, one line each, those of values that a later
    layer overrides included.
    """
    values: dict[str, object] = {key: setting.default for key, setting in SETTINGS.items()}
    sources = dict.fromkeys(SETTINGS, DEFAULT)
    faults: list[str] = []
    for layer in layers:
        faults += layer.faults
        for key, raw in _flat(layer, faults):
            try:
                values[key] = SETTINGS[key].parse(raw)
                sources[key] = layer.source
            except ValueError as error:
                faults.append(f"{key} {error} ({layer.source})")
    if faults:
        raise fault_error(faults)
    return Merged(config_of(values), sources)


def config_of(values: Mapping[str, object]) -> Config:
    """The Config that has these values by key, and defaults elsewhere."""
    sections: dict[str, Any] = {}
    for section in fields(Config):
        given = {
            setting.name: values[key]
            for key, setting in SETTINGS.items()
            if setting.section == section.name and key in values
        }
        assert isinstance(section.type, type)
        sections[section.name] = section.type(**given)
    return Config(**sections)


def values_of(config: Config) -> dict[str, object]:
    """The values of a Config by key, in the order of the schema."""
    return {
        key: getattr(getattr(config, setting.section), setting.name)
        for key, setting in SETTINGS.items()
    }


def fault_error(faults: Sequence[str]) -> ConfigError:
    """One error for all faults, a line each."""
    if len(faults) == 1:
        return ConfigError(faults[0])
    return ConfigError("\n".join([f"{len(faults)} settings are wrong", *faults]))


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """The end of a message about an unknown name: the known one that is most like it, if any is."""
    close = get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _flat(layer: Layer, faults: list[str]) -> list[tuple[str, object]]:
    """The known keys of a layer with their raw values."""
    found = []
    for section, content in layer.values.items():
        if section not in SECTIONS:
            hint = _unknown_section(section, content)
            faults.append(f"unknown section {section} ({layer.source}){hint}")
        elif not isinstance(content, Mapping):
            faults.append(f"{section} is a section, not a value ({layer.source})")
        else:
            for name, raw in content.items():
                key = f"{section}.{name}"
                if key in SETTINGS:
                    found.append((key, raw))
                else:
                    hint = _unknown_name(section, str(name))
                    faults.append(f"unknown setting {key} ({layer.source}){hint}")
    return found


def _unknown_section(section: str, content: object) -> str:
    """A name at the top level is more often a setting without its section than a section."""
    if not isinstance(content, Mapping):
        homes = [key for key, setting in SETTINGS.items() if setting.name == section]
        if homes:
            return f"; did you mean {homes[0]}?"
    return did_you_mean(section, SECTIONS)


def _unknown_name(section: str, name: str) -> str:
    """A name of another section, a name like one of this section, or one like any key."""
    homes = [key for key, setting in SETTINGS.items() if setting.name == name]
    if homes:
        return f"; did you mean {homes[0]}?"
    here = [setting.name for setting in SETTINGS.values() if setting.section == section]
    close = get_close_matches(name, here, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {section}.{close[0]}?"
    return did_you_mean(f"{section}.{name}", list(SETTINGS))
