"""What a gateway adds: the load through it and beside it, and the table."""

from io import StringIO

import pytest
from rich.console import Console

from headrace.bench.gateway import GatewayReport, measure_gateway
from headrace.bench.loads import Spread
from headrace.bench.pacer import NUM_EVENTS
from headrace.bench.streams import Delays, Samples
from headrace.bench.tables import gateway_table


def test_what_is_added_is_the_difference() -> None:
    report = GatewayReport(
        num_streams=200,
        events_per_s=4000.0,
        cpu_us_per_event=60.0,
        direct=Delays(request_ms=Spread(1.0, 2.0, 3.0), event_ms=Spread(0.1, 0.2, 0.3)),
        relay=Delays(request_ms=Spread(1.25, 2.0, 3.0), event_ms=Spread(0.1, 0.3, 0.3)),
        through=Delays(request_ms=Spread(1.5, 3.0, 5.0), event_ms=Spread(0.2, 0.4, 0.9)),
    )
    console = Console(width=100, record=True, file=StringIO())
    console.print(gateway_table(report))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["request,", "added", "0.50", "1.00", "2.00"] in lines
    assert ["request,", "added", "by", "a", "relay", "0.25", "0.00", "0.00"] in lines
    assert ["event,", "added", "0.10", "0.20", "0.60"] in lines


@pytest.mark.slow
def test_the_same_load_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    samples: list[int] = []
    measured = Samples.delays

    def delays(self: Samples) -> Delays:
        samples.append(len(self.event_ms))
        return measured(self)

    monkeypatch.setattr(Samples, "delays", delays)
    report = measure_gateway(2, 1)
    assert samples == [2 * 2 * NUM_EVENTS] * 3
    assert report.through.event_ms.p50 > 0
    assert report.cpu_us_per_event > 0
