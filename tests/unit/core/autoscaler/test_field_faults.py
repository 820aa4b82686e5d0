"""Faults that planners had in the field: none of them is had here."""

import pytest

from headrace.core.autoscaler.events import (
    Loop,
)
from headrace.core.base.request import Slo
from support.autoscaler_rig import Rig, config, latency, settled


def test_queueing_is_not_hidden_by_a_correction() -> None:
    """Where measured TTFT is above the predicted one, more is needed, not as much as before."""
    rig = settled(2, 3.2)
    late = {"num_samples": 20, "num_good": 4, "ttft_ms": latency(9000.0), "itl_ms": latency(20.0)}
    rig.pass_time(60, rate=3.2, loads=late)
    (scale, *_) = rig.scales()
    assert (scale.num_replicas, scale.reason.loop) == (3, Loop.LATENCY)
    assert rig.state().strain > 1.0


def test_prompts_that_nobody_could_prefill_in_time_pin_no_replicas() -> None:
    late = {"num_samples": 20, "num_good": 0, "ttft_ms": latency(9e5), "itl_ms": latency(20.0)}
    rig = Rig(config(down_delay_s=60.0))
    rig.begin(3)
    rig.pass_time(600, rate=0.2, prompt=3_500.0, loads=late)
    assert (rig.target or 0) <= 3
    assert all(scale.num_replicas < 3 for scale in rig.scales())


@pytest.mark.parametrize("rate", [1.0, 2.0, 2.6, 2.9, 3.3, 4.5, 5.8, 6.1])
def test_constant_load_does_not_swing(rate: float) -> None:
    rig = Rig(config())
    rig.begin(1)
    rig.pass_time(1800, rate=rate)
    counts = [scale.num_replicas for scale in rig.scales()]
    assert counts == sorted(counts)
    late = len(rig.effects)
    rig.pass_time(1800, rate=rate)
    assert len(rig.effects) == late


def test_samples_of_young_replicas_do_not_count() -> None:
    """The first requests of a replica that has just come up are slow, which is no lack of them."""
    rig = Rig(config(warm_up_s=120.0))
    rig.begin(2)
    cold = {"num_samples": 50, "num_good": 0, "ttft_ms": latency(2e4), "itl_ms": latency(900.0)}
    rig.pass_time(110, rate=2.0, loads={**cold, "queue_ms": 20_000.0, "num_running": 100})
    assert rig.effects == []
    rig.pass_time(300, rate=2.0, loads={"num_running": 1})
    assert rig.state().strain == 1.0


def test_an_engine_that_reports_no_queue_is_seen_by_its_latencies() -> None:
    rig = settled(2, 3.2)
    late = {"queue_ms": 0.0, "num_samples": 20, "num_good": 10, "ttft_ms": latency(5000.0)}
    rig.pass_time(60, rate=3.2, loads=late)
    assert rig.scales()[0].num_replicas == 3


def test_good_means_do_not_hide_a_bad_tail() -> None:
    """Half of the requests are short and quick; those that miss their limit are enough."""
    rig = settled(2, 3.2)
    figures = {"num_samples": 20, "num_good": 15, "ttft_ms": latency(300.0)}
    rig.pass_time(60, rate=3.2, loads=figures)
    assert rig.scales()[0].reason.loop is Loop.LATENCY


def test_misses_within_the_percentile_are_no_reason() -> None:
    rig = settled(2, 3.5)
    rig.pass_time(600, rate=3.5, loads={"num_samples": 20, "num_good": 18, "num_running": 2})
    assert rig.effects == []


def test_misses_that_more_replicas_do_not_mend_end_in_a_bounded_fleet() -> None:
    """A slow network, say: work is taken for harder, but not beyond all bounds."""
    rig = settled(1, 0.5, max_replicas=1000)
    bad = {"num_samples": 100, "num_good": 0, "ttft_ms": latency(9000.0)}
    rig.pass_time(3600, rate=0.5, loads=bad)
    assert (rig.target or 0) <= 2


def test_a_start_that_never_comes_blocks_nothing() -> None:
    rig = settled(1, 1.0)
    rig.start_s = 1e9
    rig.pass_time(65, rate=8.0)
    wanted = rig.target or 0
    rig.pass_time(600, rate=16.0)
    assert (rig.target or 0) > wanted
    rig.pass_time(600, rate=0.5)
    assert rig.target == 1


def test_no_limits_at_all_still_keep_up_with_the_load() -> None:
    rig = Rig(config(), slo=Slo())
    rig.begin(1)
    rig.pass_time(200, rate=20.0)
    assert (rig.target or 0) > 3
