"""`headrace explain config`: every setting, its value, and why it has that value."""

from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from headrace.cli.output import console, print_json, print_table
from headrace.cli.settings import load_settings
from headrace.core.base.errors import ConfigError
from headrace.core.config.merge import DEFAULT, Merged, values_of
from headrace.core.config.resolve import Resolution, resolve
from headrace.core.config.settings import SETTINGS
from headrace.core.config.units import format_bytes, size_text
from headrace.live.machine import machine_facts

LEGIBLE_CHARS = 7  # of a size: "1.25GiB", but not "1310724KiB"


def explain_config(model: str | None, flags: Any, *, as_json: bool) -> int:
    merged = load_settings(flags, model=model)
    resolution, note = _resolve(merged)
    if as_json:
        print_json(_figures(merged, resolution))
    else:
        print_table(_table(merged, resolution))
        console().print(Text(note), soft_wrap=True)
    return 0


def _resolve(merged: Merged) -> tuple[Resolution, str]:
    """With the model where it is here and sound; else only with the machine, and why."""
    from headrace.cli.dry import local_model, plan_dry

    machine = machine_facts()
    path = local_model(merged.config.model.path)
    if path is None:
        note = "the model is not on this machine, so what depends on it is open"
        return resolve(merged.config, machine), note
    try:
        _, resolution, _ = plan_dry(path, merged.config, machine)
    except ConfigError as error:
        note = f"what depends on the model is open: {error.message}"
        return resolve(merged.config, machine), note
    return resolution, f"numbers that depend on the model are those of {path}"


@dataclass(frozen=True)
class _Line:
    """One setting explained."""

    key: str
    asked: object
    value: object
    source: str
    reason: str  # "" where the value is as asked


def _lines(merged: Merged, resolution: Resolution) -> list[_Line]:
    asked, values = values_of(merged.config), values_of(resolution.config)
    return [
        _Line(key, asked[key], values[key], merged.sources[key], resolution.reasons.get(key, ""))
        for key in SETTINGS
    ]


def _figures(merged: Merged, resolution: Resolution) -> dict[str, dict[str, object]]:
    figures = {}
    for line in _lines(merged, resolution):
        setting = SETTINGS[line.key]
        figures[line.key] = {
            "value": line.value,
            "asked": line.asked,
            "source": line.source,
            "reason": line.reason or None,
            "default": setting.default,
            "limits": setting.limits,
            "help": setting.help,
            "flag": setting.flag,
            "variable": setting.variable,
        }
    return figures


def _table(merged: Merged, resolution: Resolution) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("setting", no_wrap=True)
    for heading in ("value", "source", "meaning"):
        table.add_column(heading, overflow="fold")
    for line in _lines(merged, resolution):
        style = "" if line.source == DEFAULT else "bold"
        source = f"{line.source}: {line.reason}" if line.reason else line.source
        meaning = SETTINGS[line.key].help
        value = _shown(line.value, is_size=SETTINGS[line.key].is_size)
        table.add_row(line.key, Text(value, style), Text(source), Text(meaning))
    return table


def _shown(value: object, *, is_size: bool) -> str:
    """As a flag would take it."""
    if is_size and isinstance(value, int):
        text = size_text(value)
        return text if len(text) <= LEGIBLE_CHARS else f"{text} ({format_bytes(value)})"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        value = ",".join(value)
    return str(value) if value != "" else '""'
