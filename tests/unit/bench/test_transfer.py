"""KV between processes: every block comes by each way, and the table says what it is beside."""

from io import StringIO

import pytest
from rich.console import Console

from headrace.bench import transfer
from headrace.bench.tables import transfer_table
from headrace.bench.transfer import measure_transfer


def test_each_way_stands_beside_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "NUM_BLOCKS", 3)
    monkeypatch.setattr(transfer, "BLOCK_BYTES", 4096)
    report = measure_transfer()
    assert [(one.way, one.limit) for one in report.ways] == [
        ("shared memory", "memcpy"),
        ("TCP", "bare socket"),
        ("TCP", "bare socket, same blocks"),
    ]
    assert all(min(one.gb_per_s, one.limit_gb_per_s, one.share) > 0 for one in report.ways)
    console = Console(width=100, record=True, file=StringIO())
    console.print(transfer_table(report))
    text = console.export_text()
    assert "3 blocks of 4,096 bytes" in text
    assert "bare socket" in text
