"""What this process may use: affinity, quota, memory."""

import os
from pathlib import Path

import pytest

from headrace.live.machine import cpu_quota, machine_facts, num_cores


@pytest.fixture
def cpu_max(tmp_path: Path) -> Path:
    return tmp_path / "cpu.max"


@pytest.mark.parametrize(
    ("text", "quota"),
    [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None), ("x", None), ("1 0", None)],
)
def test_a_quota_is_cores_of_time(text: str, quota: float | None, cpu_max: Path) -> None:
    cpu_max.write_text(text)
    assert cpu_quota(cpu_max) == quota


def test_no_file_is_no_quota(cpu_max: Path) -> None:
    assert cpu_quota(cpu_max) is None
    assert num_cores(cpu_max) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "cores"), [("10000 100000", 1), ("150000 100000", 2), ("900000 100000", 4)]
)
def test_cores_are_the_affinity_within_the_quota_rounded_up(
    quota: str, cores: int, cpu_max: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 2, 5, 7})
    cpu_max.write_text(quota)
    assert num_cores(cpu_max) == cores


def test_facts_of_this_machine() -> None:
    facts = machine_facts()
    assert facts.num_cores >= 1
    assert 0 < facts.available_bytes <= facts.total_bytes


def test_what_is_held_counts_as_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.live.machine.available_bytes", lambda: 1000)
    assert machine_facts(held_bytes=24).available_bytes == 1024
