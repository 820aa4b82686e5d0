"""The constants that the package carries meet measured points, and a fit meets points it has not
seen.
"""

import msgspec
import numpy as np
import pytest

from headrace.core.base.errors import ConfigError
from headrace.plan.engines import Engine, engine_fits
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
    assert found.order_of_throughput.median >= 0.9
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
