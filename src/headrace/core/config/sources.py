"""The sources that people write settings in, as layers: a TOML text, an environment, flags.

Decides how a source spells a setting; refuses to open a file or to look at the process.
"""

import tomllib
from collections.abc import Mapping
from typing import Final

from headrace.core.config.merge import Layer, did_you_mean
from headrace.core.config.settings import SETTINGS

PREFIX: Final = "HEADRACE_"

VARIABLES: Final = {
    "HEADRACE_CONFIG": "settings file, as with --config",
    "HEADRACE_CACHE": "folder that fetched models are kept in",
    "HEADRACE_DEBUG": "1 = errors show their traceback, as with --debug",
}
"""Variables beside those of the settings, and what they are for."""

_BY_VARIABLE: Final = {setting.variable: setting for setting in SETTINGS.values()}


def layer_from_toml(name: str, text: str) -> Layer:
    """A file's layer. A text that is not TOML is the layer's one fault."""
    source = f"file {name}"
    try:
        return Layer(source, tomllib.loads(text))
    except ValueError as error:  # a number of thousands of digits is one that is no TOMLDecodeError
        return Layer(source, {}, [f"{name} is not TOML: {str(error).lower()}"])
    except RecursionError:
        return Layer(source, {}, [f"{name} is nested too deeply"])


def layers_from_environ(environ: Mapping[str, str]) -> list[Layer]:
    """A layer for every HEADRACE_ variable; unknown ones are faults. An empty value is a value."""
    layers = []
    for variable in sorted(environ):
        source = f"env {variable}"
        setting = _BY_VARIABLE.get(variable)
        if setting is not None:
            values = {setting.section: {setting.name: environ[variable]}}
            layers.append(Layer(source, values))
        elif variable.startswith(PREFIX) and variable not in VARIABLES:
            hint = _meant(variable)
            layers.append(Layer(source, {}, [f"unknown variable {variable}{hint}"]))
    return layers


def layers_from_flags(values: Mapping[str, object]) -> list[Layer]:
    """A layer for every key that has a value; None = the flag was not given."""
    layers = []
    for key, raw in values.items():
        if raw is not None:
            setting = SETTINGS[key]
            values_ = {setting.section: {setting.name: raw}}
            given = "argument MODEL" if key == "model.path" else f"flag {setting.flag}"
            layers.append(Layer(given, values_))
    return layers


def _meant(variable: str) -> str:
    """The variable of a setting whose name alone was written, or the one most like this."""
    name = variable.removeprefix(PREFIX).lower()
    for setting in SETTINGS.values():
        if name in (setting.name, setting.flag.strip("-").replace("-", "_")):
            return f"; did you mean {setting.variable}?"
    # Compared without the prefix, which would make all of them alike.
    names = [known.removeprefix(PREFIX) for known in (*_BY_VARIABLE, *VARIABLES)]
    return did_you_mean(variable.removeprefix(PREFIX), names, prefix=PREFIX)
