"""`headrace doctor`: what fits this machine, and what looks wrong.

Each check looks at one thing and says ok, warn or fail, with what to do about it. A check never
changes anything: nothing is fetched, no weight is loaded.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from rich.table import Table
from rich.text import Text

from headrace.cli.checks import Check, Status
from headrace.cli.checks.machine import check_cores, check_cpu, check_load, check_memory
from headrace.cli.checks.model import check_cache, check_model
from headrace.cli.checks.program import (
    check_core,
    check_native,
    check_port,
    check_python,
    check_torch,
)
from headrace.cli.output import print_json, print_table
from headrace.cli.settings import load_settings, served
from headrace.core.base.errors import ConfigError
from headrace.core.config.schema import Config, ModelConfig

CHECKS: tuple[Callable[[Config], Iterator[Check]], ...] = (
    check_python,
    check_native,
    check_core,
    check_torch,
    check_cpu,
    check_cores,
    check_load,
    check_memory,
    check_cache,
    check_model,
    check_port,
)

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


def doctor(model: str | None, flags: Any, *, as_json: bool) -> int:
    checks, config = _check_settings(model, flags)
    for check in CHECKS:
        checks += check(config)
    has_failed = any(check.status is Status.FAIL for check in checks)
    if as_json:
        print_json({"is_ok": not has_failed, "checks": [check.figures() for check in checks]})
    else:
        _print(checks)
    return 1 if has_failed else 0


def _check_settings(model: str | None, flags: Any) -> tuple[list[Check], Config]:
    """Wrong settings are one finding among others, and the rest is looked at with the defaults."""
    try:
        config, sources = served(load_settings(flags, model=model))
    except ConfigError as error:
        check = Check("settings", Status.FAIL, error.message, "headrace explain config lists them")
        return [check], replace(Config(), model=ModelConfig(path=model or ""))
    own = {source for source in sources.values() if source != "default"}
    said = f"from {', '.join(sorted(own))}" if own else "all defaults"
    return [Check("settings", Status.OK, said)], config


def _print(checks: list[Check]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        text = Text(check.detail)
        if check.hint:
            text.append(f"\n{check.hint}", "dim")
        table.add_row(Text(check.status.value, _STYLES[check.status]), check.name, text)
    print_table(table)
