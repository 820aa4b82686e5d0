"""When a recording's own times are worth a warning."""

from typing import Any

import pytest
from msgspec.structs import replace

from headrace.core.base.types import Ns
from headrace.core.cost.fitted import StepTimes
from headrace.core.telemetry import Cause
from headrace.core.workload.recording import Recording, read_recording
from headrace.sim.doubts import doubts_of
from support.recordings import COST, line, lines_of, pool

# Off by a tenth, and a twentieth of the time outside the device: a quiet machine.
QUIET = StepTimes(
    num_steps=100,
    took_ns=1_000_000_000,
    predicted_ns=1_020_000_000,
    error_ns=100_000_000,
    late_ns=50_000_000,
)


def recording_of(times: StepTimes, *causes: Cause) -> Recording:
    workers = replace(pool(), cost=replace(COST, times=times))
    requests = [
        line(i, 0.1 * i, [i] * 20, ttft_ns=Ns(1), causes=(cause,))
        for i, cause in enumerate(causes or [Cause.OWN_PREFILL])
    ]
    return read_recording(lines_of(requests, workers))


def test_a_quiet_machine_is_not_doubted() -> None:
    doubts = doubts_of(recording_of(QUIET), {"e2e_ms_mean": 100.0}, {"e2e_ms_mean": 90.0})
    assert doubts.warnings == ()
    [facts] = doubts.steps
    assert (facts.recorded_s, facts.predicted_s) == (1.0, 1.02)
    assert (facts.error_share, facts.late_share) == (0.1, 0.05)
    short = replace(QUIET, late_ns=250_000_000)
    assert doubts_of(recording_of(short), {}).warnings == ()
    assert doubts_of(recording_of(StepTimes()), {}).steps == ()  # of an older headrace


@pytest.mark.parametrize(
    ("otherwise", "told"),
    [
        ({"late_ns": 500_000_000}, "50% of the time outside the device: the driver was late"),
        ({"error_ns": 500_000_000}, "off by 50% without sign, 5% of the time outside the device: "),
        ({"predicted_ns": 500_000_000}, "predicted 0.5 s"),
    ],
)
def test_steps_of_a_starved_machine(otherwise: dict[str, Any], told: str) -> None:
    [warning] = doubts_of(recording_of(replace(QUIET, **otherwise)), {}).warnings
    assert told in warning
    assert ("does not explain" in warning) == ("late_ns" not in otherwise)
    few = replace(QUIET, num_steps=10, **otherwise)
    assert doubts_of(recording_of(few), {}).warnings == ()


def test_requests_that_waited_for_the_server() -> None:
    half = recording_of(QUIET, Cause.ROUTER_WAIT, Cause.QUEUE)
    doubts = doubts_of(half, {})
    assert doubts.router_wait_share == 0.5
    assert doubts.warnings[0].startswith("50% of the requests waited for their first token most")
    few = recording_of(QUIET, Cause.ROUTER_WAIT, *[Cause.QUEUE] * 19)
    assert doubts_of(few, {}).warnings == ()


def test_a_simulation_that_comes_out_otherwise() -> None:
    was = {"ttft_ms_mean": 100.0, "tpot_ms_mean": 3.0, "e2e_ms_mean": 400.0}
    will = {"ttft_ms_mean": 60.0, "tpot_ms_mean": 1.5, "e2e_ms_mean": None}
    [warning] = doubts_of(recording_of(QUIET), was, will).warnings
    assert warning.endswith("on average: TTFT 60 ms where 100 ms were recorded (-40%)")
    assert doubts_of(recording_of(QUIET), was, None).warnings == ()
