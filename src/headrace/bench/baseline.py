"""Figures that a change of the code should not move unnoticed: measured, kept, compared.

Decides which figures are kept, how far they may move, and when two of them mean the same thing.
"""

import platform
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from headrace.bench.counted import countable_isa
from headrace.bench.counting import (
    NUM_SEQS,
    compiler,
    count_instructions,
    count_step_bytecodes,
    has_valgrind,
)
from headrace.bench.kernels import KernelReport, measure_kernels
from headrace.bench.machine import Machine, machine
from headrace.core.base.errors import ConfigError

COUNT_TOLERANCE = 0.05
RATIO_TOLERANCE = 0.25
_RATIO_STEPS = ("decode 1 at 320", "decode 32 at 320", "chunk of 512 at 0")


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one kind, and all that they depend on besides the code."""

    valid_for: dict[str, str]
    values: dict[str, float]
    tolerance: float
    is_less_better: bool


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    kinds: dict[str, Figures]  # those that could be measured


class Change(msgspec.Struct, frozen=True, kw_only=True):
    figure: str
    before: float | None  # none = the baseline does not have it
    after: float | None
    change: float | None  # after / before - 1
    verdict: str  # "better", "worse", "new" or "gone"


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """`changes` are those beyond the tolerance."""

    num_compared: int
    changes: list[Change]
    not_compared: dict[str, str]  # kind -> why


def measure_baseline(*, with_ratios: bool = True, seconds: float = 30.0) -> Baseline:
    """Counts take two to three minutes, ratios (of the default model) `seconds`."""
    facts = machine()
    kinds = {
        "bytecode instructions": Figures(
            valid_for={"python": ".".join(platform.python_version_tuple()[:2])},
            values={f"step, running {n}": count_step_bytecodes(n) for n in NUM_SEQS},
            tolerance=COUNT_TOLERANCE,
            is_less_better=True,
        )
    }
    if has_valgrind():
        kinds["machine instructions"] = Figures(
            valid_for={"isa": countable_isa(), "compiler": compiler()},
            values={**count_instructions()},
            tolerance=COUNT_TOLERANCE,
            is_less_better=True,
        )
    if with_ratios:
        report = measure_kernels(seconds=seconds)
        kinds["ratios"] = Figures(
            valid_for={
                "cpu": facts.cpu,
                "threads": str(report.limits.num_threads),
                "isa": report.limits.isa,
                "model": report.model,
            },
            values={name: round(value, 4) for name, value in ratios_of(report)},
            tolerance=RATIO_TOLERANCE,
            is_less_better=False,
        )
    return Baseline(machine=facts, kinds=kinds)


def ratios_of(report: KernelReport) -> Iterator[tuple[str, float]]:
    """What of a kernel report says more of the code than of the machine; more is better."""
    steps = {(row.name, row.activations): row for row in report.steps}
    for (name, activations), row in steps.items():
        if name in _RATIO_STEPS and row.share is not None:
            yield f"share of the limit, {name}, {activations}", row.share
    for name in _RATIO_STEPS:
        exact, rounded = steps.get((name, "f32")), steps.get((name, "int8"))
        if exact and rounded:
            yield f"speed of int8 to f32, {name}", exact.median_ms / rounded.median_ms
    for activations in ("f32", "int8"):
        one, many = (steps.get((name, activations)) for name in _RATIO_STEPS[:2])
        if one and many:
            ratio = 32 * one.median_ms / many.median_ms
            yield f"speed of 32 sequences to 1, at 320, {activations}", ratio


def difference(before: Baseline, after: Baseline) -> Difference:
    """What moved. Figures that depend on something that is not as it was are not compared."""
    changes: list[Change] = []
    not_compared: dict[str, str] = {}
    num_compared = 0
    for kind, old in before.kinds.items():
        new = after.kinds.get(kind)
        if new is None:
            not_compared[kind] = "not measured here"
        elif new.valid_for != old.valid_for:
            not_compared[kind] = _unlike(old.valid_for, new.valid_for)
        else:
            num_compared += len(old.values.keys() & new.values.keys())
            changes += _changes(old, new)
    return Difference(num_compared=num_compared, changes=changes, not_compared=not_compared)


def _changes(old: Figures, new: Figures) -> Iterator[Change]:
    for figure in dict.fromkeys([*old.values, *new.values]):
        before, after = old.values.get(figure), new.values.get(figure)
        if before is None or after is None:
            verdict = "new" if before is None else "gone"
            yield Change(figure=figure, before=before, after=after, change=None, verdict=verdict)
            continue
        change = after / before - 1
        if abs(change) > old.tolerance:
            is_better = (change < 0) == old.is_less_better
            yield Change(
                figure=figure,
                before=before,
                after=after,
                change=change,
                verdict="better" if is_better else "worse",
            )


def _unlike(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    return ", ".join(
        f"{key} is {new.get(key)} here and {value} there"
        for key, value in old.items()
        if new.get(key) != value
    )


def write_baseline(path: Path, baseline: Baseline) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(baseline), indent=2)
    path.write_bytes(text + b"\n")


def read_baseline(path: Path) -> Baseline:
    """ConfigError where there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Baseline)
    except OSError as error:
        raise ConfigError(
            f"{path}: there is no baseline: {error.strerror}", hint="headrace bench baseline"
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: this is no baseline: {error}") from error
