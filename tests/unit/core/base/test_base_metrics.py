"""The definitions, on figures worked out by hand."""

import msgspec
import pytest

from headrace.core.base.metrics import (
    Metric,
    e2e_ns,
    find_excesses,
    is_good,
    itl_ns,
    per_second,
    percentile,
    tpot_ns,
    ttft_ns,
)
from headrace.core.base.request import FinishReason, Slo
from headrace.core.base.types import NS_PER_MS, Ns

MS = NS_PER_MS


class Client(msgspec.Struct):
    """What a load client measures: it needs to know no engine to be judged by the same rule."""

    reason: FinishReason = FinishReason.STOP
    num_output_tokens: int = 5
    ttft_ns: Ns | None = Ns(100 * MS)
    max_itl_ns: Ns | None = Ns(30 * MS)
    tpot_ns: float | None = 20.0 * MS
    e2e_ns: Ns = Ns(180 * MS)


def test_latencies_of_five_tokens() -> None:
    sent = [Ns(ms * MS) for ms in (1100, 1120, 1120, 1150, 1180)]
    arrived = Ns(1000 * MS)
    ttft, e2e = ttft_ns(arrived, sent[0]), e2e_ns(arrived, sent[-1])
    assert (ttft, e2e) == (100 * MS, 180 * MS)
    assert itl_ns(sent) == [20 * MS, 0, 30 * MS, 30 * MS]
    assert tpot_ns(e2e, ttft, len(sent)) == 20 * MS == sum(itl_ns(sent)) / 4


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_single_token_has_no_tpot(num_tokens: int) -> None:
    assert tpot_ns(Ns(100), Ns(100), num_tokens) is None


@pytest.mark.parametrize(
    ("slo", "missed"),
    [
        (Slo(), []),
        (Slo(100.0, 30.0, 20.0, 180.0), []),  # a limit that is just reached is kept
        (Slo(ttft_ms=99.9), [Metric.TTFT]),
        (Slo(itl_ms=29.0), [Metric.ITL]),
        (Slo(tpot_ms=19.0), [Metric.TPOT]),
        (Slo(e2e_ms=179.0), [Metric.E2E]),
        (Slo(1.0, 1.0, 1.0, 1.0), list(Metric)),
        (Slo(ttft_ms=0.0), [Metric.TTFT]),
    ],
)
def test_every_stated_limit_must_be_kept(slo: Slo, missed: list[Metric]) -> None:
    excesses = find_excesses(Client(), slo)
    assert [excess.metric for excess in excesses] == missed
    assert is_good(Client(), slo) == (not missed)
    assert all(excess.actual_ns > excess.limit_ns for excess in excesses)


def test_a_single_token_cannot_miss_what_it_does_not_have() -> None:
    single = Client(num_output_tokens=1, max_itl_ns=None, tpot_ns=None)
    assert is_good(single, Slo(itl_ms=0.1, tpot_ms=0.1))


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.DEADLINE])
def test_a_failure_is_never_good(reason: FinishReason) -> None:
    assert not is_good(Client(reason=reason), Slo())


def test_the_good_have_tokens() -> None:
    assert is_good(Client(reason=FinishReason.CANCELLED), Slo())
    assert not is_good(
        Client(reason=FinishReason.CANCELLED, num_output_tokens=0, ttft_ns=None), Slo()
    )


def test_without_a_first_token_the_whole_wait_counts() -> None:
    waited = Client(num_output_tokens=0, ttft_ns=None, max_itl_ns=None, tpot_ns=None)
    assert [e.actual_ns for e in find_excesses(waited, Slo(ttft_ms=150.0))] == [180 * MS]
    assert find_excesses(waited, Slo(ttft_ms=200.0)) == []


def test_rates() -> None:
    assert per_second(30, Ns(10_000 * MS)) == 3.0
    assert per_second(30, Ns(0)) == 0.0


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(v) for v in range(1, 101)]
    assert [percentile(values, share) for share in (0.01, 0.5, 0.9, 0.99, 1.0)] == [
        1.0,
        50.0,
        90.0,
        99.0,
        100.0,
    ]
    assert percentile([7.0], 0.5) == 7.0
