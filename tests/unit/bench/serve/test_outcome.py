"""Latencies by their definitions, and results that cannot be."""

from typing import Any

import pytest

from headrace.bench.serve.outcome import IMPOSSIBLE, Latencies
from headrace.core.base.metrics import Metric, find_excesses, is_good
from headrace.core.base.request import Slo
from support.outcomes import ns, outcome


def test_latencies_count_from_the_moment_that_is_said() -> None:
    one = outcome(10.0, [110.0, 120.0, 170.0], sent_ns=ns(60.0), ended_ns=ns(171.0))
    due, sent = Latencies.since(one.due_ns, one), Latencies.since(one.sent_ns, one)
    assert (due.ttft_ns, due.e2e_ns) == (ns(100.0), ns(160.0))
    assert (sent.ttft_ns, sent.e2e_ns) == (ns(50.0), ns(110.0))
    assert due.tpot_ns == sent.tpot_ns == ns(30.0)
    assert due.max_itl_ns == ns(50.0)
    assert one.lag_ns == ns(50.0)
    limits = Slo(ttft_ms=60.0)
    assert is_good(sent, limits)
    assert not is_good(due, limits)


def test_a_single_token_has_no_time_per_token() -> None:
    one = outcome(0.0, [90.0])
    found = Latencies.since(one.due_ns, one)
    assert found.tpot_ns is None
    assert found.max_itl_ns is None
    assert is_good(found, Slo(ttft_ms=100.0, tpot_ms=1.0))
    assert not is_good(found, Slo(ttft_ms=80.0, tpot_ms=1.0))


def test_tokens_of_one_event_count_in_the_mean() -> None:
    one = outcome(0.0, [100.0, 200.0], num_usage_tokens=5)
    found = Latencies.since(one.due_ns, one)
    assert found.tpot_ns == ns(25.0)
    assert found.max_itl_ns == ns(100.0)


def test_a_failure_is_never_good() -> None:
    late = outcome(0.0, [], fault="timed out", ended_ns=ns(900.0), num_usage_tokens=None)
    found = Latencies.since(late.due_ns, late)
    assert not is_good(found, Slo())
    assert [miss.metric for miss in find_excesses(found, Slo(ttft_ms=500.0))] == [Metric.TTFT]
    cut = outcome(0.0, [10.0, 20.0], fault="broken off", num_usage_tokens=None)
    assert not is_good(Latencies.since(cut.due_ns, cut), Slo())


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"tokens_ms": [-5.0, 1.0]}, "TTFT is below zero"),
        ({"sent_ns": ns(-10.0)}, "sent before it was due"),
        ({"ended_ns": ns(150.0)}, "token after its end"),
        ({"tokens_ms": [100.0, 120.0, 110.0, 130.0]}, "out of order"),
        ({"asked_output_tokens": 2}, "3 tokens where 2 were asked for"),
        ({"num_usage_tokens": 1}, "3 events with 1 tokens"),
        ({"num_usage_tokens": 0}, "3 events with 0 tokens"),
        ({"tokens_ms": [], "num_usage_tokens": 4}, "4 tokens by the server's count, and no event"),
        ({"num_cached_tokens": 9}, "9 cached tokens of a prompt of 8"),
    ],
)
def test_what_cannot_be_is_a_failure(facts: dict[str, Any], reason: str) -> None:
    one = outcome(**{"due_ms": 0.0, **facts}).checked()
    assert one.fault == IMPOSSIBLE
    assert reason in one.detail


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"num_usage_tokens": 2},  # text that was held back came by itself
        {"num_usage_tokens": 9},  # several tokens in an event
        {"num_usage_tokens": None, "num_prompt_tokens": None},
        {"num_cached_tokens": 8},
        {"tokens_ms": [], "num_usage_tokens": 0},
        {"sent_ns": ns(-1.0)},  # a timer that fired early
    ],
)
def test_what_can_be_stays(facts: dict[str, Any]) -> None:
    assert not outcome(**facts).checked().fault


def test_a_failure_keeps_its_kind() -> None:
    assert outcome(fault="status 500", asked_output_tokens=1).checked().fault == "status 500"
