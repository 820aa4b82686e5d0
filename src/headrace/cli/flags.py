"""The schema's settings as flags: one class of flags for each set of sections a command takes.

Decides how a setting looks on the command line; refuses to parse its value, which `merge` does, so
that every fault is found and worded in one place.
"""

from collections.abc import Iterable
from dataclasses import fields, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from headrace.core.config.settings import SECTIONS, SETTINGS, Setting
from headrace.core.config.units import size_text

CONFIG_GROUP = Group("Settings", sort_key=10)
_GROUPS = {
    section: Group(f"{section.capitalize() if section != 'kv' else 'KV'} settings", sort_key=index)
    for index, section in enumerate(SECTIONS, 11)
}
_SEPARATOR = "__"

Model = Annotated[
    str | None,
    Parameter(
        name="--model",
        help="GGUF file, folder of safetensors or hub id; none = the default model",
        show_default=False,
    ),
]
"""The model of a command: its last word, or under a flag."""

Json = Annotated[
    bool, Parameter(name="--json", negative="", help="print figures as JSON", show_default=False)
]


def flag_values(flags: Any) -> dict[str, object]:
    """The raw values that were given, by the key of their setting; for None, nothing."""
    if flags is None:
        return {}
    values = {
        field.name.replace(_SEPARATOR, "."): getattr(flags, field.name)
        for field in fields(flags)
        if field.name != "config"
    }
    return {key: value for key, value in values.items() if value is not None}


def config_file(flags: Any) -> str | None:
    """The file that --config names."""
    return None if flags is None else flags.config


def _flag_class(name: str, sections: Iterable[str]) -> Any:
    config = Annotated[
        str | None,
        Parameter(
            name="--config",
            metavar="FILE",
            help="TOML file with settings; also HEADRACE_CONFIG",
            group=CONFIG_GROUP,
            show_default=False,
        ),
    ]
    members: list[tuple[str, Any, Any]] = [("config", config, None)]
    for key, setting in SETTINGS.items():
        # The model is an argument of the commands, under a name of their own.
        if setting.section in sections and key != "model.path":
            members.append((key.replace(".", _SEPARATOR), _annotation(setting), None))
    made = make_dataclass(name, members, frozen=True, kw_only=True)
    # The library takes classes of the standard library for values, and make_dataclass says "types".
    made.__module__ = __name__
    return Annotated[made | None, Parameter(name="*")]


def _annotation(setting: Setting) -> Any:
    is_flag = setting.type is bool
    kind: Any = list[str] if setting.type is tuple else bool if is_flag else str
    return Annotated[
        kind | None,
        Parameter(
            name=setting.flag,
            negative=f"--no-{setting.flag[2:]}" if is_flag else "",
            help=f"{setting.help} [{_facts(setting)}]",
            group=_GROUPS[setting.section],
            metavar=_metavar(setting),
            show_default=False,
        ),
    ]


def _metavar(setting: Setting) -> str | None:
    if setting.type is bool:
        return None
    if setting.is_size:
        return "SIZE"
    return {int: "N", float: "NUMBER", str: "TEXT", tuple: "TEXT"}[setting.type]


def _facts(setting: Setting) -> str:
    """What stands in brackets: choices and default."""
    default = f"default {shown_default(setting)}"
    return f"{setting.limits}; {default}" if setting.choices else default


def shown_default(setting: Setting) -> str:
    if setting.type is bool:
        return str(setting.default).lower()
    if setting.is_size and isinstance(setting.default, int) and setting.default:
        return size_text(setting.default)
    return "empty" if setting.default in ("", ()) else str(setting.default)


if TYPE_CHECKING:
    # Made from the schema, so that a checker cannot know their fields.
    AllFlags = Any
    EngineFlags = Any
else:
    AllFlags = _flag_class("AllFlags", SECTIONS)
    EngineFlags = _flag_class("EngineFlags", ("model", "device", "kv", "scheduler"))
