"""What is left of memory: the machine's, or its container's."""

import os
from pathlib import Path

import pytest

from headrace.live import memory


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    return tmp_path


def test_without_a_container_it_is_what_the_machine_has_left(cgroup: Path) -> None:
    assert 0 < memory.available_bytes() < 1 << 50


def test_a_container_has_less_than_its_machine(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text("1000000\n")
    (cgroup / "memory.current").write_text("700000\n")
    assert memory.available_bytes() == 300_000
    (cgroup / "memory.stat").write_text("anon 500000\ninactive_file 150000\nactive_file 1\n")
    assert memory.available_bytes() == 450_000
    (cgroup / "memory.current").write_text("2000000\n")
    assert memory.available_bytes() == 0


def test_a_container_without_a_limit_has_its_machines(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("700000\n")
    assert memory.available_bytes() > 700_000


def test_where_nobody_says_what_is_free_it_is_half(
    cgroup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_fields", lambda path, separator: {})
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PHYS_PAGES": 100}.get(name, 4096))
    assert memory.available_bytes() == 100 * 4096 // 2
