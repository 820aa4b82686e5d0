"""Machines that were calibrated, in `plan fleet` and in `plan routing --simulate`.

Decides which flags a calibration leaves without a meaning; refuses to know the question.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from headrace.cli.plan_fleet_flags import WorkerFlags
from headrace.cli.plan_target import check_range
from headrace.cli.sim_cost import provenance_of, with_beyond
from headrace.core.base.errors import ConfigError
from headrace.live.cost_file import read_calibration
from headrace.plan.engines import Provenance
from headrace.sim.fleet_machine import CalibratedKind

KEPT = ("step_tokens", "seed")  # of WorkerFlags, which a calibrated machine takes too


def calibrated_kinds(
    files: Sequence[str], prices: Sequence[str], worker: WorkerFlags
) -> list[CalibratedKind]:
    """Machines are called as their files. Raises ConfigError for what they say already."""
    check_nothing_else_runs(worker)
    names = [Path(file).stem for file in files]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two machines are called {twice}", hint="give --cost files other names")
    usd_by_name = dict(map(_price, prices))
    if unknown := set(usd_by_name) - set(names):
        raise ConfigError(f"--price of {min(unknown)}", hint="machines: " + ", ".join(names))
    if unpriced := set(names) - set(usd_by_name):
        name = min(unpriced)
        raise ConfigError(f"{name} has no price", hint=f"say --price {name}=USD, an hour's")
    return [
        CalibratedKind(name, file, read_calibration(Path(file).expanduser()), usd_by_name[name])
        for name, file in zip(names, files, strict=True)
    ]


def only_kind(file: str, worker: WorkerFlags) -> CalibratedKind:
    """Where its price decides nothing."""
    [kind] = calibrated_kinds([file], [f"{Path(file).stem}=1"], worker)
    return kind


def check_nothing_else_runs(worker: WorkerFlags) -> None:
    usual = WorkerFlags()
    kept = {name: getattr(worker, name) for name in KEPT}
    if worker != replace(usual, **kept):
        name = next(
            one.name
            for one in fields(worker)
            if one.name not in KEPT and getattr(worker, one.name) != getattr(usual, one.name)
        )
        raise ConfigError(
            f"--cost FILE says what runs already, and --{name.replace('_', '-')} too",
            hint="leave out the flags of what runs",
        )


def calibrated_provenance(kinds: Sequence[CalibratedKind], priced: bool = True) -> Provenance:
    """Once all that is asked was asked."""
    found = [provenance_of(kind.found, kind.file, kind.num_engines) for kind in kinds]
    sources = dict.fromkeys(source for one in found for source in one.sources)
    if priced:
        prices = ", ".join(f"{kind.name} ${kind.usd_per_hour:g}" for kind in kinds)
        sources[f"prices of a machine and hour, as given: {prices}"] = None
    beyond = dict.fromkeys(word for one in found for word in one.extrapolates)
    told = Provenance(kind="calibrated", sources=tuple(sources), extrapolates=tuple(beyond))
    return with_beyond(told, [f"{kind}: {word}" for kind in kinds for word in kind.beyond()])


def _price(words: str) -> tuple[str, float]:
    """NAME=USD"""
    name, equals, number = words.rpartition("=")
    try:
        usd = float(number) if equals else 0.0
    except ValueError:
        usd = 0.0
    return name, check_range(f"--price {name or words}", usd, 1e-9, 1e6)
