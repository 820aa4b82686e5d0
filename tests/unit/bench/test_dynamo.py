"""A peer's index holds what ours holds and is asked what ours is asked, or the run is refused."""

import json
import sys
from importlib import metadata
from io import StringIO
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from headrace.bench import dynamo
from headrace.bench.dynamo import measure_dynamo
from headrace.bench.router import measure
from headrace.bench.tables import router_table
from headrace.core.base.errors import HeadraceError


class Tree:
    """As its binding: events as JSON, scores by worker."""

    def __init__(self) -> None:
        self.blocks: dict[int, set[int]] = {}

    def apply_event(self, worker_id: int, event: bytes) -> None:
        stored = json.loads(event)["data"]["stored"]
        held = self.blocks.setdefault(worker_id, set())
        held.update(block["block_hash"] for block in stored["blocks"])

    def find_matches(self, hashes: list[int]) -> Any:
        scores = {}
        for index, held in self.blocks.items():
            count = next((at for at, one in enumerate(hashes) if one not in held), len(hashes))
            if count:
                scores[(index, 0)] = count
        return SimpleNamespace(scores=scores)


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("dynamo._core")
    module.RadixTree = Tree  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dynamo._core", module)
    known = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "9.9" if name == dynamo.PACKAGE else known(name)
    )


@pytest.mark.usefixtures("_installed")
def test_it_stands_beside_our_own() -> None:
    report = measure(num_workers=8, num_replicas=4096, num_decisions=5)
    assert report.dynamo is not None
    assert report.dynamo.version == "9.9"
    console = Console(width=120, record=True, file=StringIO())
    console.print(router_table(report))
    assert "Dynamo 9.9's index" in console.export_text()


@pytest.mark.usefixtures("_installed")
def test_an_index_that_finds_less_is_no_peer() -> None:
    names = [bytes([at]) * 16 for at in range(1, 5)]
    with pytest.raises(HeadraceError, match="does not hold"):
        measure_dynamo([(0, names)], [names], num_hit_blocks=5, num_passes=1)


def test_where_it_is_not_installed_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "PACKAGE", "headrace-has-no-such-package")
    assert measure(num_workers=4, num_replicas=2048, num_decisions=3).dynamo is None
