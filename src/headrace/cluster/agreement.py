"""Whether two front ends ask for the same engine.

Decides which settings have to be alike, by what they come to: "auto" and the value that it stands
for are the same. Refuses to know who asks.
"""

from headrace.core.base.errors import ConfigError
from headrace.core.config.merge import values_of
from headrace.core.config.resolve import Resolution, resolve
from headrace.core.config.schema import Config

# What an engine is made of; the rest of a configuration is each front end's own.
SHARED_SECTIONS = ("model", "device", "kv", "scheduler")


def differences(asked: Config, served: Config, resolution: Resolution) -> list[str]:
    """The settings in which they differ, for people, each with both values. `resolution` is what
    the engine that runs has made of `served`, here and with this model.
    """
    wanted, had = values_of(asked), values_of(served)
    try:
        found = resolve(asked, resolution.machine, resolution.model)
    except ConfigError:  # it comes to nothing, so something that is said is another
        found_values, held_values = wanted, had
    else:
        found_values, held_values = values_of(found.config), values_of(resolution.config)
    # What both leave open comes to another value only where something else is different.
    return [
        f"{key} = {_said(had[key], held)}, not {_said(wanted[key], found_values[key])}"
        for key, held in held_values.items()
        if key.partition(".")[0] in SHARED_SECTIONS
        and wanted[key] != had[key]
        and found_values[key] != held
    ]


def _said(given: object, resolved: object) -> str:
    return repr(resolved) if given == resolved else f"{resolved!r} (from {given!r})"
