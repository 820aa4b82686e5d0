"""Layers of raw values from named sources become one Config that knows where each value came from.

Decides which of several values counts; refuses to know how a source is read.
"""

from collections.abc import Iterator, Mapping, Sequence
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
    if len(faults) > 1:
        faults.insert(0, f"{len(faults)} settings are wrong")
    if faults:
        raise ConfigError("\n".join(faults))
    return Merged(config_of(values), sources)


def from_settings(values: Mapping[str, Any]) -> Config:
    """A Config from fields by their names alone, as a caller in Python gives them."""
    keys = {setting.name: key for key, setting in SETTINGS.items()}
    layers = []
    for name, raw in values.items():
        if name in keys:
            section, _, _ = keys[name].partition(".")
            layers.append(Layer("argument", {section: {name: raw}}))
        else:
            hint = did_you_mean(name, list(keys))
            layers.append(Layer("argument", {}, [f"unknown setting {name} (argument){hint}"]))
    return merge(layers).config


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


def did_you_mean(name: str, names: Sequence[str], *, prefix: str = "") -> str:
    """The end of a message about an unknown name: the known one that is most like it, if any is."""
    close = get_close_matches(name, names, n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def _flat(layer: Layer, faults: list[str]) -> Iterator[tuple[str, object]]:
    """The known keys of a layer with their raw values; what is not known goes to `faults`."""
    for section, content in layer.values.items():
        if section not in SECTIONS:
            faults.append(_unknown_section(section, content, layer.source))
        elif not isinstance(content, Mapping):
            faults.append(f"{section} is a section, not a value ({layer.source})")
        else:
            for name, raw in content.items():
                key = f"{section}.{name}"
                if key in SETTINGS:
                    yield key, raw
                else:
                    hint = _meant(str(name), key)
                    faults.append(f"unknown setting {key} ({layer.source}){hint}")


def _unknown_section(name: str, content: object, source: str) -> str:
    """A value at the top level is a setting without its section."""
    if isinstance(content, Mapping):
        return f"unknown section {name} ({source}){did_you_mean(name, SECTIONS)}"
    return f"unknown setting {name} ({source}){_meant(name, name)}"


def _meant(name: str, key: str) -> str:
    """The setting of that name in another section, else the one whose key is most like this."""
    homes = [known for known, setting in SETTINGS.items() if setting.name == name]
    return f"; did you mean {homes[0]}?" if homes else did_you_mean(key, list(SETTINGS))
