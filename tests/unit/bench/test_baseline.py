"""Counts do not depend on the run, and a baseline shows what moved."""

from functools import partial
from pathlib import Path

import msgspec
import pytest

from headrace.bench.baseline import (
    Baseline,
    Change,
    Figures,
    difference,
    ratios_of,
    read_baseline,
    write_baseline,
)
from headrace.bench.counted import cases
from headrace.bench.counting import compiler, count_bytecodes, count_step_bytecodes
from headrace.bench.kernels import KernelReport, Timed
from headrace.bench.machine import machine
from headrace.core.base.errors import ConfigError
from support.limits import LIMITS

COMMITTED = Path(__file__).parents[2] / "bench" / "baseline.json"


def baseline(values: dict[str, float], *, less: bool = True, **valid_for: str) -> Baseline:
    kind = Figures(valid_for=valid_for, values=values, tolerance=0.05, is_less_better=less)
    return Baseline(machine=machine(), kinds={"counts": kind})


def test_little_moves_are_no_changes() -> None:
    found = difference(baseline({"a": 100, "b": 100}), baseline({"a": 104.9, "b": 95.1}))
    assert (found.num_compared, found.changes, found.not_compared) == (2, [], {})


def test_what_moved_is_said_with_its_direction() -> None:
    found = difference(baseline({"a": 100, "b": 100}), baseline({"a": 110, "b": 90}))
    assert [(c.figure, c.verdict) for c in found.changes] == [("a", "worse"), ("b", "better")]
    assert found.changes[0].change == pytest.approx(0.1)
    rates = difference(baseline({"a": 1.0}, less=False), baseline({"a": 1.2}, less=False))
    assert rates.changes[0].verdict == "better"


def test_figures_that_came_or_went_are_changes() -> None:
    found = difference(baseline({"a": 1, "b": 2}), baseline({"b": 2, "c": 3}))
    assert found.changes == [
        Change(figure="a", before=1, after=None, change=None, verdict="gone"),
        Change(figure="c", before=None, after=3, change=None, verdict="new"),
    ]
    assert found.num_compared == 1


def test_what_depends_on_something_else_is_not_compared() -> None:
    found = difference(baseline({"a": 1}, python="3.11"), baseline({"a": 9}, python="3.12"))
    assert found.changes == []
    assert found.not_compared == {"counts": "python is 3.12 here and 3.11 there"}
    nothing = msgspec.structs.replace(baseline({}), kinds={})
    assert difference(baseline({"a": 1}), nothing).not_compared == {"counts": "not measured here"}


def test_a_baseline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "baseline.json"
    written = baseline({"a": 1.5}, isa="avx2")
    write_baseline(path, written)
    assert read_baseline(path) == written


@pytest.mark.parametrize("text", [None, "{}", "no JSON"])
def test_a_file_that_is_no_baseline(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "baseline.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="no baseline"):
        read_baseline(path)


def test_the_committed_baseline_has_every_case() -> None:
    kinds = read_baseline(COMMITTED).kinds
    assert {*kinds["machine instructions"].values} == {*cases()}
    assert {*kinds} == {"bytecode instructions", "machine instructions", "ratios"}


def test_every_case_runs_again_and_again() -> None:
    for case in cases().values():
        case.run()
        case.run()


def test_bytecodes_are_counted_exactly() -> None:
    def loop(count: int) -> None:
        for _ in range(count):
            pass

    ten, twenty, thirty = (count_bytecodes(partial(loop, n)) for n in (10, 20, 30))
    assert thirty - twenty == twenty - ten > 0


def test_a_step_has_the_same_count_each_time() -> None:
    first, second = (count_step_bytecodes(4, num_steps=8) for _ in range(2))
    assert first == second > 100
    assert count_step_bytecodes(8, num_steps=8) > first


def test_the_compiler_has_signed() -> None:
    assert compiler().startswith(("GCC", "clang"))


def timed(name: str, activations: str, median_ms: float) -> Timed:
    return Timed(
        name=name,
        activations=activations,
        num_runs=3,
        median_ms=median_ms,
        fastest_ms=median_ms,
        weight_bytes=1,
        kv_bytes=1,
        num_operations=1,
        gbytes_per_s=1.0,
        gflop_per_s=1.0,
        share=0.5,
        bound="memory",
    )


def test_ratios_say_more_of_the_code_than_of_the_machine() -> None:
    steps = [
        timed("decode 1 at 320", "f32", 10.0),
        timed("decode 32 at 320", "f32", 80.0),
        timed("decode 1 at 320", "int8", 8.0),
        timed("decode 8 at 320", "int8", 8.0),
    ]
    report = KernelReport(
        model="m", weight_types="q4_1", limits=LIMITS, steps=steps, operations=[], left_out=[]
    )
    assert dict(ratios_of(report)) == {
        "share of the limit, decode 1 at 320, f32": 0.5,
        "share of the limit, decode 32 at 320, f32": 0.5,
        "share of the limit, decode 1 at 320, int8": 0.5,
        "speed of int8 to f32, decode 1 at 320": 1.25,
        "speed of 32 sequences to 1, at 320, f32": 4.0,
    }
