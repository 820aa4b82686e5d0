"""Errors are relative, misses are marked and counted."""

import pytest

from headrace.bench.client import Answer
from headrace.bench.twin.figures import Served, compare, hits, line
from headrace.core.base.types import Ns


def served(sent_ms: float, ttft_ms: float, tpot_ms: float, num_output: int) -> Served:
    sent = round(sent_ms * 1e6)
    first = sent + round(ttft_ms * 1e6)
    return Served.of_answer(
        Answer(
            sent_ns=Ns(sent),
            first_token_ns=Ns(first),
            last_token_ns=Ns(first + round((num_output - 1) * tpot_ms * 1e6)),
            num_prompt_tokens=20,
            num_output_tokens=num_output,
            num_cached_tokens=0,
        )
    )


def test_errors_are_relative_and_misses_are_marked() -> None:
    live = [served(0.0, 100.0, 10.0, 11), served(1000.0, 100.0, 10.0, 11)]
    sim = [served(0.0, 115.0, 10.2, 11), served(1000.0, 115.0, 10.2, 11)]
    slower = [served(0.0, 135.0, 10.4, 11), served(1000.0, 135.0, 10.4, 11)]
    faster = [served(0.0, 95.0, 10.0, 11), served(1000.0, 95.0, 10.0, 11)]
    row = compare("case", live, [sim, slower, faster], load_average=1.0, slowness=[1.1])
    assert row.live.ttft_ms == row.live.ttft_ms_p99 == 100.0
    assert row.live.e2e_ms == pytest.approx(200.0)
    assert row.errors["ttft_ms"] == pytest.approx(0.15)
    assert row.errors["tpot_ms"] == pytest.approx(0.02)
    # Of several seeds the mean counts, and how far they lie apart is kept.
    assert (row.simulated_low.ttft_ms, row.simulated_high.ttft_ms) == (95.0, 135.0)
    # A p99 may be further off than a mean.
    assert row.missed == ("ttft_ms",)
    assert "**100 · 115 · +15**" in line(row)
    assert line(row).count("**") == 2
    assert hits([row, row]) == (
        "6 of 8 cells of means and throughput within 10%; 6 of 6 cells of p99 within 20%"
    )
