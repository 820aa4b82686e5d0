"""The page's goodput card to the last printed digit, and the closed forms beside it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.base.request import Slo
from headrace.plan import page, queueing
from headrace.plan.goodput import Goodput, Verdict, compute_goodput
from headrace.plan.reference import REFERENCE_70B_H100, REFERENCE_LOAD_PER_S, REFERENCE_TRAFFIC
from headrace.plan.service import Latencies, ServiceTimes, Split

SERVICE = ServiceTimes(
    cost=REFERENCE_70B_H100,
    num_workers=12,
    prompt_tokens=REFERENCE_TRAFFIC.prompt_tokens,
    output_tokens=REFERENCE_TRAFFIC.output_tokens,
    design_batch_seqs=128,
    chunk_tokens=512,
)


@pytest.fixture(scope="module")
def found() -> Goodput:
    return compute_goodput(SERVICE, REFERENCE_TRAFFIC.slo, REFERENCE_LOAD_PER_S, with_page=True)


def verdict(found: Goodput, model: str, mode: str) -> Verdict:
    return next(one for one in found.verdicts if (one.model, one.mode) == (model, mode))


def in_ms(one: Verdict) -> tuple[int, int]:
    assert one.ttft_s is not None
    assert one.tpot_s is not None
    return round(one.ttft_s * 1000), round(one.tpot_s * 1000)


def test_every_printed_digit_of_the_page(found: Goodput) -> None:
    shared = verdict(found, "page", queueing.PREFILL_FIRST)
    apart = verdict(found, "page", queueing.SPLIT)
    assert f"{found.capacity_per_s:.0f}" == "22"
    assert in_ms(shared) == (1140, 94)
    assert in_ms(apart) == (747, 63)
    assert (shared.sustainable_per_s, shared.binds) == (6.8, "tpot")
    assert (apart.sustainable_per_s, apart.binds) == (12.1, "ttft")
    assert f"{apart.prefill_workers:.1f} / {apart.decode_workers:.1f}" == "9.4 / 2.6"
    assert f"{found.gain_by_model['page']:.1f}" == "1.8"
    assert (shared.is_good, apart.is_good) == (False, True)


def test_the_steps_behind_the_page(found: Goodput) -> None:
    assert found.prefill_worker_s_per_request == pytest.approx(0.434863, abs=1e-6)
    assert found.design_step_s == pytest.approx(0.061354, abs=1e-6)
    assert found.decode_worker_s_per_request == pytest.approx(0.122708, abs=1e-6)
    assert found.utilisation == pytest.approx(0.41818, abs=1e-5)
    assert found.kv_transfer_bytes_per_request == 491_520_000


def test_the_exact_loads_behind_the_page(found: Goodput) -> None:
    """6.85001 and 12.163 would be rounded up: the page looks at tenths that hold."""

    def most(mode: Callable[[ServiceTimes, float], Latencies | None]) -> float:
        low, high = 1.0, 21.0
        for _ in range(60):
            load = (low + high) / 2
            one = mode(SERVICE, load)
            holds = one is not None and one.ttft_s <= 1.0 and one.tpot_s <= 0.08
            low, high = (load, high) if holds else (low, load)
        return low

    assert most(page.colocated) == pytest.approx(6.85001, abs=1e-4)
    assert most(page.disaggregated) == pytest.approx(12.163, abs=5e-4)
    assert found.gain_by_model["page"] == pytest.approx(1.779, abs=5e-4)


def test_closed_forms(found: Goodput) -> None:
    first = verdict(found, "closed form", queueing.PREFILL_FIRST)
    apart = verdict(found, "closed form", queueing.SPLIT)
    assert first.tpot_s == pytest.approx(0.0648, abs=1e-4)
    assert f"{first.sustainable_per_s:.1f}" == "12.1"
    assert apart.ttft_s == pytest.approx(0.591, abs=5e-4)
    assert apart.tpot_s == pytest.approx(0.0482, abs=1e-4)
    assert f"{apart.decode_seqs:.0f}" == "42"


def test_chunks_read_the_weights_once_for_both_kinds_of_work(found: Goodput) -> None:
    """At this load chunked prefill beats whole prompts, and a split as well."""
    most = {(v.model, v.mode): v.sustainable_per_s for v in found.verdicts}
    modes = (queueing.CHUNKED, queueing.SPLIT, queueing.PREFILL_FIRST)
    chunked, split, prefill_first = (most["closed form", mode] for mode in modes)
    assert chunked > split > prefill_first


def test_a_split_of_whole_workers_is_the_best_of_all(found: Goodput) -> None:
    whole = found.verdicts[-1]
    assert whole.prefill_workers is not None
    for num in range(1, 12):
        load = whole.sustainable_per_s * 1.001
        other = queueing.disaggregated(SERVICE, load, Split(num, 12 - num))
        assert other is None or other.ttft_s > 1.0 or other.tpot_s > 0.08


@given(st.floats(0.1, 20), st.floats(0.1, 5))
def test_latencies_grow_with_the_load(load: float, more: float) -> None:
    models = (page.colocated, page.disaggregated, queueing.prefill_first, queueing.chunked)
    for model in models:
        light, heavy = model(SERVICE, load), model(SERVICE, load + more)
        if light is None:
            assert heavy is None
        elif heavy is not None:
            assert heavy.ttft_s > light.ttft_s * 0.98  # whole sequences decode beside a chunk
            assert heavy.tpot_s > light.tpot_s * 0.98


def test_curves_rise_to_the_sustainable_load_and_end_there(found: Goodput) -> None:
    for one in found.verdicts:
        good = [load for load, goodput in one.goodput_per_s_by_load if goodput]
        assert max(good) == one.sustainable_per_s
        assert all(goodput in (0.0, load) for load, goodput in one.goodput_per_s_by_load)


def test_what_cannot_keep_a_limit_sustains_nothing() -> None:
    strict = compute_goodput(SERVICE, Slo(tpot_ms=1.0), 1.0, with_page=True)
    assert {one.sustainable_per_s for one in strict.verdicts} == {0.0}
    assert strict.gain_by_model == {}


def test_a_hand_off_takes_the_time_of_its_bytes() -> None:
    slow = replace(SERVICE, kv_link_bytes_per_s=50e9)
    split = SERVICE.balanced_split
    with_link = queueing.disaggregated(slow, 9.0, split)
    without = queueing.disaggregated(SERVICE, 9.0, split)
    assert with_link is not None
    assert without is not None
    assert with_link.ttft_s - without.ttft_s == pytest.approx(0.00983, abs=1e-5)


def test_one_worker_cannot_be_split() -> None:
    alone = compute_goodput(replace(SERVICE, num_workers=1), Slo(ttft_ms=2e3), 0.1, with_page=False)
    assert [one.mode for one in alone.verdicts] == [queueing.PREFILL_FIRST, queueing.CHUNKED]
