"""The constants that the package carries meet measured points, and a fit meets points it has not
seen.
"""

import msgspec
import numpy as np
import pytest

from headrace.core.base.errors import ConfigError
from headrace.plan.engines import Engine, engine_fits
from headrace.plan.steps import num_seqs_that_fit
from support.closed_loop_ttft import held_out_ms, host_ms, simulated_ms, that_fit
from support.fit_engines import constants, errors, fit, held_out
from support.hardware_points import EXTRACT, Point, read_points

POINTS = list(read_points(EXTRACT))
ENGINES = ["trtllm", "vllm", "sglang"]


def of(engine: str) -> list[Point]:
    return [point for point in POINTS if point.engine == engine]


@pytest.mark.parametrize("engine", ENGINES)
def test_tpot_of_dense_models_is_within_the_bound(engine: str) -> None:
    found = Engine.named(engine)
    off = [
        abs(p.predicted(found.efficiency, found.interference_share).tpot_ns / 1e6 / p.tpot_ms - 1)
        for p in of(engine)
    ]
    assert len(off) >= 25
    assert sum(off) / len(off) <= 0.12


@pytest.mark.parametrize("engine", ENGINES)
def test_the_errors_that_are_told_keep_the_bound(engine: str) -> None:
    found = engine_fits()[engine]
    assert found.series_held_out.mean <= 0.12
    assert found.in_sample.mean <= found.series_held_out.mean
    assert found.order_of_throughput.min >= 0.95
    assert found.moe_not_fitted


def test_shares_are_shares() -> None:
    for found in engine_fits().values():
        eff = found.efficiency
        shares = (eff.memory_share, eff.flop_share, eff.link_share, found.interference_share)
        assert all(0 < share < 1 for share in shares)


def test_without_a_fit_there_is_the_data_sheet() -> None:
    assert Engine.named("ideal").efficiency.flop_share == 1.0
    with pytest.raises(ConfigError, match="vllm"):
        Engine.named("vlm")


def test_quantised_checkpoints_keep_kv_as_their_engine_does() -> None:
    kept = {name: Engine.named(name).kv_dtype("fp8") for name in ("ideal", *ENGINES)}
    assert kept == {"ideal": "bf16", "trtllm": "fp8", "vllm": "bf16", "sglang": "bf16"}
    assert Engine.named("trtllm").kv_dtype("bf16") == "bf16"


def test_a_fit_finds_the_constants_that_made_its_points() -> None:
    truth = fit(of("vllm")[::6])
    made = [
        msgspec.structs.replace(p, tpot_ms=p.tpot_ms * (1 + error))
        for p, error in zip(of("vllm"), errors(of("vllm"), truth), strict=True)
    ]
    found = fit(made)
    assert np.abs(errors(made, found)).max() < 0.05
    assert constants(found)["memory_share"] == pytest.approx(
        constants(truth)["memory_share"], rel=0.05
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["trtllm", "vllm"])
def test_whole_configurations_that_no_fit_has_seen(engine: str) -> None:
    """Its fits know a quarter to a half of the points that those of the package know."""
    assert held_out(of(engine), lambda p: p.series).mean() <= 0.15


def test_who_waits_for_memory_tells_what_sglang_keeps_of_it() -> None:
    """16 clients of one H100 wait three times as long as an answer takes: it has room for five."""
    one = next(p for p in of("sglang") if p.tp == 1 and p.output_tokens == 128)
    assert one.prompt_tokens == 1024
    assert one.ttft_ms / (one.output_tokens * one.tpot_ms) == pytest.approx(2.1, abs=0.1)
    context = one.prompt_tokens + one.output_tokens
    assert num_seqs_that_fit(one.cost(Engine.named("sglang").efficiency), context) in (4, 5, 6)


def test_what_passes_outside_of_steps_is_the_constant_of_least_relative_error() -> None:
    simulated = np.array([10.0, 20.0, 30.0, 40.0])
    assert host_ms(simulated + 25.0, simulated) == pytest.approx(25.0)
    assert host_ms(simulated + np.array([25.0, 25.0, 25.0, 900.0]), simulated) == 25.0
    assert host_ms(simulated - 5.0, simulated) == 0.0


def test_clients_of_a_sweep_wait_as_long_as_simulated_ones() -> None:
    """A few points that are soon simulated; with the constants of the package."""
    efficiency = Engine.named("vllm").efficiency
    few = [p for p in of("vllm") if p.concurrency * p.output_tokens <= 4096][::3]
    simulated = np.array([simulated_ms(p, efficiency) for p in few])
    measured = np.array([p.ttft_ms for p in few])
    off = np.abs((simulated + host_ms(measured, simulated)) / measured - 1)
    assert len(few) == 8
    assert off.mean() <= 0.3


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ttft_of_clients_with_costs_that_no_fit_has_seen_of_them() -> None:
    few = [p for p in that_fit(of("vllm"), "vllm") if p.concurrency * p.output_tokens <= 16384]
    measured = np.array([p.ttft_ms for p in few])
    assert np.abs(held_out_ms(few) / measured - 1).mean() <= 0.3
