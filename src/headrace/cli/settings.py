"""Reads what an operator has written, wherever it stands, and merges it."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.cli.flags import config_file, flag_values
from headrace.core.base.errors import ConfigError
from headrace.core.config.merge import Layer, Merged, merge
from headrace.core.config.scaling import scaling_faults
from headrace.core.config.sources import layer_from_toml, layers_from_environ, layers_from_flags
from headrace.core.workload.profiles import PROFILES
from headrace.models.files import read_text

CONFIG_VARIABLE = "HEADRACE_CONFIG"
MAX_FILE_BYTES = 1 << 20
_SEVERAL = "the bounds of the autoscaler leave nothing to decide"


def load_settings(
    flags: Any = None,
    *,
    model: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Merged:
    """Defaults < the settings file < HEADRACE_ variables < flags. ConfigError lists every fault.

    A file counts only where it is named, by --config or else by HEADRACE_CONFIG: a server does not
    change with the folder that it is started in.
    """
    environ = os.environ if environ is None else environ
    layers = []
    file = config_file(flags) or environ.get(CONFIG_VARIABLE)
    if file:
        layers.append(_read_file(file))
    layers += layers_from_environ(environ)
    layers += layers_from_flags({"model.path": model, **flag_values(flags)})
    return with_workload(layers)


def served(merged: Merged) -> Merged:
    """The same, for a server; ConfigError where values that are each as they may be mean nothing
    together.
    """
    if faults := list(scaling_faults(merged.config, merged.sources)):
        raise ConfigError("\n".join(faults if len(faults) == 1 else [_SEVERAL, *faults]))
    return merged


def with_workload(layers: Sequence[Layer]) -> Merged:
    """Merged, over the limits of the workload that they name: whatever says a limit is over it."""
    merged = merge(layers)
    name = merged.config.telemetry.workload
    if name not in PROFILES:
        return merged
    slo = msgspec.structs.asdict(PROFILES[name].slo)
    limits = {f"slo_{metric}": limit or 0.0 for metric, limit in slo.items()}
    return merge([Layer(f"workload {name}", {"telemetry": limits}), *layers])


def _read_file(name: str) -> Layer:
    try:
        text = read_text(Path(name).expanduser(), MAX_FILE_BYTES)
    except ConfigError as error:
        return Layer(f"file {name}", {}, [f"settings file {error.message}"])
    return layer_from_toml(name, text)
