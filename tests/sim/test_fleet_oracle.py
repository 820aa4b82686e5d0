"""The search for a fleet against an oracle that simulates every fleet of a small space."""

from collections.abc import Iterator
from random import Random

import msgspec
import pytest

from headrace.core.base.request import Slo
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.hardware import Layout
from headrace.core.workload.profiles import WorkloadProfile
from headrace.plan.fleet import Kind, Shape
from headrace.plan.presets import presets_with
from headrace.plan.queueing import CHUNKED, PREFILL_FIRST, SPLIT
from headrace.sim.fleet import SLACK, FleetQuestion, search_fleet
from headrace.sim.fleet_answer import FleetAnswer, pareto
from headrace.sim.fleet_trial import Cut, Fleet, Measured, Traffic, run_fleet
from headrace.sim.summary import Summary

PRESETS = presets_with(None)


def kind(name: str, usd_per_hour: float, speed: float) -> Kind:
    """A worker of one device, of which prices and speeds are free."""
    h100 = PRESETS.accelerator("H100 SXM")
    accelerator = msgspec.structs.replace(
        h100,
        name=name,
        price_usd_per_hour=usd_per_hour,
        flop_per_s_by_dtype={"bf16": 0.2e15 * speed},
        memory_bytes_per_s=h100.memory_bytes_per_s * speed**0.5,
    )
    model = PRESETS.model("Meta-Llama-3.1-8B")
    return Kind(DataSheetCostModel(model=model, accelerator=accelerator, layout=Layout(tp=1)))


def question(seed: int, num_seeds: int = 3) -> FleetQuestion:
    """Two kinds of workers, alone and as a pair, under limits that some of them hardly keep."""
    rng = Random(seed)
    kinds = [
        kind("A", 2.0, 1.0),
        kind("B", rng.uniform(1.0, 6.0), rng.choice([0.5, 1.5, 2.5])),
    ]
    modes = rng.sample([CHUNKED, PREFILL_FIRST, SPLIT], 2)
    shapes = [Shape(decode=one, mode=mode) for one in kinds for mode in modes]
    shapes.append(Shape(decode=kinds[0], other=kinds[1], mode=SPLIT))
    profile = WorkloadProfile(
        name="drawn",
        purpose="",
        prompt_tokens=rng.choice([400, 1000, 2000]),
        output_tokens=rng.choice([3, 20, 60]),
        turns=rng.choice([1, 1, 3]),
        pause_s=1.0,
        slo=Slo(ttft_ms=rng.choice([400.0, 800.0]), tpot_ms=rng.choice([30.0, 60.0])),
    )
    load = rng.uniform(10.0, 25_000.0 / profile.prompt_tokens)
    return FleetQuestion(
        shapes=tuple(shapes),
        traffic=Traffic(profile=profile, load_per_s=load, num_requests=60),
        seeds=tuple(range(num_seeds)),
        policies=("kv", "round_robin"),
        block_size=64,
        max_gpus=8,
    )


def every_fleet(asked: FleetQuestion, dearest: float) -> Iterator[Fleet]:
    most = range(1, asked.max_gpus + 1)
    for shape in asked.shapes:
        for policy in asked.policies:
            for prefill in most if shape.mode == SPLIT else (0,):
                for decode in most:
                    if (
                        prefill + decode <= asked.max_gpus
                        and shape.usd_per_hour(prefill, decode) <= dearest
                    ):
                        yield Fleet(
                            shape=shape,
                            prefill_workers=prefill,
                            decode_workers=decode,
                            policy=policy,
                            step_tokens=asked.step_tokens,
                            block_size=asked.block_size,
                        )


def measured(asked: FleetQuestion, fleet: Fleet) -> Measured:
    runs = [run_fleet(fleet, asked.traffic, seed) for seed in asked.seeds]
    assert not any(isinstance(run, Cut) for run in runs)
    return Measured(fleet=fleet, runs=tuple(run for run in runs if isinstance(run, Summary)))


def all_measured(asked: FleetQuestion, found: FleetAnswer) -> list[Measured]:
    """The space: what costs no more than the search looks at."""
    assert found.best is not None
    dearest = found.best.usd_per_hour * SLACK
    every = [measured(asked, fleet) for fleet in every_fleet(asked, dearest)]
    return sorted(every, key=lambda one: one.rank)


def check(asked: FleetQuestion) -> None:
    found = search_fleet(asked)
    if found.best is None:
        assert not any(
            measured(asked, fleet).holds(asked.attainment) for fleet in every_fleet(asked, 1e9)
        )
        return
    every = all_measured(asked, found)
    best = next(one for one in every if one.holds(asked.attainment))
    assert found.best.usd_per_million_good_output_tokens is not None
    assert best.cost is not None
    assert found.best.usd_per_million_good_output_tokens.mean <= 1.02 * best.cost.mean
    # Whatever is better than the cheapest that does is on the front, or something as good is.
    for one in pareto([one for one in every if one.rank >= best.rank]):
        assert one.cost is not None
        assert any(
            row.usd_per_million_good_output_tokens is not None
            and row.usd_per_million_good_output_tokens.mean <= 1.05 * one.cost.mean
            and row.attainment.mean >= one.attainment.mean - 0.01
            for row in found.rows
        ), str(one.fleet)


def test_a_lucky_first_seed_hides_no_cheaper_fleet() -> None:
    """One fast worker holds under the first seed, not under all: its price refuses nobody."""
    profile = WorkloadProfile(
        name="short",
        purpose="",
        prompt_tokens=1000,
        output_tokens=20,
        slo=Slo(ttft_ms=400.0, tpot_ms=40.0),
    )
    shapes = [Shape(decode=kind("A", 2.0, 1.0), mode=CHUNKED)]
    shapes.append(Shape(decode=kind("B", 3.1, 1.6), mode=CHUNKED))
    check(
        FleetQuestion(
            shapes=tuple(shapes),
            traffic=Traffic(profile=profile, load_per_s=20.0, num_requests=60),
            policies=("kv", "round_robin"),
            block_size=64,
        )
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(8))
def test_no_fleet_of_a_drawn_space_is_better(seed: int) -> None:
    check(question(seed))
