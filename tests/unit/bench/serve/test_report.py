"""A run's figures beside those of a naive fold, and what is said of bad runs."""

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import pytest

from headrace.bench.serve.asked import Rules, Traffic
from headrace.bench.serve.outcome import Outcome
from headrace.bench.serve.report import Report, report_of
from headrace.bench.serve.server_facts import ServerFacts
from headrace.core.base.request import Slo
from headrace.core.workload.arrivals import Arrivals
from headrace.core.workload.profiles import CHAT, RAG
from support.outcomes import client_facts, ns, outcome

OPEN = Traffic(profile=CHAT, arrivals=Arrivals.steady(1.0))
CLOSED = Traffic(profile=CHAT, concurrency=2)
RULES = Rules(slo=Slo(ttft_ms=120.0, tpot_ms=60.0))


def report(
    outcomes: Sequence[Outcome], *, traffic: Traffic = OPEN, rules: Rules = RULES, **facts: Any
) -> Report:
    client = facts.pop("client", client_facts())
    return report_of(outcomes, traffic, rules, client, facts.pop("server", None), **facts)


def drawn(rng: Random) -> list[Outcome]:
    found = []
    for number in range(300):
        due_ms = number * 20.0
        at_ms = due_ms + rng.uniform(20.0, 150.0)
        tokens_ms = [at_ms := at_ms + rng.uniform(0.0, 100.0) for _ in range(rng.randint(1, 9))]
        fault = rng.choice(["", "", "", "", "status 503"])
        lag_ns = ns(rng.uniform(0.0, 30.0))
        found.append(outcome(due_ms, tokens_ms, fault=fault, sent_ns=ns(due_ms) + lag_ns))
    rng.shuffle(found)
    return found


def test_figures_are_those_of_a_naive_fold() -> None:
    outcomes = drawn(Random(3))
    found = report(outcomes, rules=msgspec.structs.replace(RULES, warm_up_s=1.0))
    counted = [one for one in outcomes if one.due_ns >= 1e9]
    whole = [one for one in counted if not one.fault]

    def is_kept(one: Outcome) -> bool:
        times = one.token_times_ns
        if times[0] - one.due_ns > 120e6:
            return False
        return len(times) == 1 or (times[-1] - times[0]) / (len(times) - 1) <= 60e6

    num_good = sum(is_kept(one) for one in whole)
    assert 20 < num_good < len(whole)
    assert (found.num_sent, found.num_counted) == (300, len(counted)) == (300, 250)
    assert found.since_due.num_good == num_good
    assert found.since_due.attainment.value == pytest.approx(num_good / 250)
    assert found.num_failed_by_fault == {"status 503": 250 - len(whole)}
    assert found.num_single_token == sum(len(one.token_times_ns) == 1 for one in whole)
    assert found.tpot_ms.count == len(whole) - found.num_single_token
    assert found.load_per_s == pytest.approx(50.0)
    goodput = found.since_due.goodput_per_s
    assert goodput is not None
    assert goodput.value == pytest.approx(50.0 * num_good / 250)
    assert goodput.low is not None
    assert goodput.low < goodput.value
    ttfts = sorted((one.token_times_ns[0] - one.due_ns) / 1e6 for one in whole)
    p90 = found.since_due.ttft_ms.p90
    assert p90 is not None
    assert p90.value == next(t for t in ttfts if sum(x <= t for x in ttfts) >= 0.9 * len(ttfts))
    sent_p90 = found.since_sent.ttft_ms.p90
    assert sent_p90 is not None
    assert sent_p90.value < p90.value
    begin, end = min(o.due_ns for o in counted), max(o.due_ns for o in counted)
    tokens = [at for one in whole for at in one.token_times_ns]
    rate = sum(begin <= at <= end for at in tokens) / (end - begin) * 1e9
    assert found.output_tokens_per_s == pytest.approx(rate)


def test_rates_leave_out_the_drain_where_requests_come_by_themselves() -> None:
    outcomes = [
        outcome(0.0, [10.0, 500.0]),
        outcome(500.0, [510.0, 900.0]),
        outcome(1000.0, [5000.0, 9000.0]),
    ]
    found = report(outcomes)
    assert found.window_s == 1.0
    assert found.load_per_s == 2.0  # two gaps
    assert found.output_tokens_per_s == 4.0
    closed = report(outcomes, traffic=CLOSED)
    assert closed.window_s == 9.0
    assert closed.load_per_s == pytest.approx(3 / 9)
    burst = report(outcomes, traffic=msgspec.structs.replace(OPEN, is_burst=True))
    assert burst.load_per_s is None
    assert burst.since_due.goodput_per_s is None
    assert burst.finished_per_s == pytest.approx(3 / 9)


def test_shares_of_caches_are_of_answers_that_tell() -> None:
    found = report([outcome(num_cached_tokens=4), outcome(20.0, num_cached_tokens=None)])
    assert found.cached_share == 0.5
    assert report([outcome()]).cached_share is None


def test_a_run_that_was_sent_late_is_no_measurement() -> None:
    late = [outcome(10.0 * n, sent_ns=ns(10.0 * n + 60.0 * (n % 10 == 0))) for n in range(50)]
    (fault,) = report(late).faults
    assert "sent late: p99 of the send lag is 60 ms, more than 50 ms" in fault
    assert not report(late, rules=msgspec.structs.replace(RULES, max_lag_ms=70.0)).faults
    (fault,) = report([outcome()], client=client_facts(loop_lag_ms=[80.0])).faults
    assert "client was too slow" in fault


def test_impossible_answers_make_a_run_one_too_when_they_are_many() -> None:
    good = [outcome(10.0 * n, [10.0 * n + 1, 10.0 * n + 2]) for n in range(200)]
    bad = [outcome(5.0 + n, num_usage_tokens=99).checked() for n in range(3)]
    (fault,) = report(good + bad).faults
    assert "3 of 203 answers cannot be: 99 tokens where 16 were asked for" in fault
    assert not report(good + bad[:2]).faults


def test_a_run_without_answers_is_none() -> None:
    assert report([outcome(fault="status 401")]).faults == ["no request was answered whole"]
    rules = msgspec.structs.replace(RULES, warm_up_s=5.0)
    assert report([outcome()], rules=rules).faults == ["no request came after the warm-up"]
    assert report([]).since_due.num_good == 0


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"num_usage_tokens": None}, "came without usage"),
        ({"num_prompt_tokens": 400}, "prompts have 50.00 times the tokens"),
        ({"asked_output_tokens": 16}, "answers are shorter than asked"),
        ({"num_usage_tokens": 9}, "an event carries 3.0 tokens on average"),
        ({"tokens_ms": [5.0, 5.1], "num_usage_tokens": 8}, "came all at once"),
    ],
)
def test_what_to_beware_of(facts: dict[str, Any], text: str) -> None:
    calm: dict[str, Any] = {"asked_output_tokens": 3}
    assert not any(text in one for one in report([outcome(**calm)]).warnings)
    assert any(text in one for one in report([outcome(**{**calm, **facts})]).warnings)


def test_a_server_that_works_for_others_is_told() -> None:
    def found(num_output_tokens: int, num_left: int = 0) -> list[str]:
        server = ServerFacts(
            hit_rate=None,
            queue_ms=None,
            ttft_ms=None,
            num_preemptions=None,
            num_output_tokens=num_output_tokens,
        )
        outcomes = [outcome(asked_output_tokens=3), outcome(20.0, fault="broken off")]
        told = report(outcomes, server=server, num_left=num_left)
        assert told.server == server
        return [one for one in told.warnings if "others" in one]

    assert found(6) == found(16) == []
    assert found(100) == ["the server made 94 tokens for others meanwhile"]
    assert found(100, num_left=1) == []  # whose tokens nobody has counted


def test_sessions_that_had_hardly_begun_are_told() -> None:
    def told(rate_per_s: float, traffic: Traffic = OPEN) -> bool:
        asked = msgspec.structs.replace(traffic, arrivals=Arrivals.steady(rate_per_s))
        outcomes = [outcome(500.0 * number, [500.0 * number + 9]) for number in range(20)]
        return any(
            "asked for: until sessions" in one for one in report(outcomes, traffic=asked).warnings
        )

    assert told(4.0)
    assert not told(2.5)
    assert not told(4.0, msgspec.structs.replace(OPEN, profile=RAG))
    assert not told(4.0, CLOSED)
