"""The search for a fleet, on workloads whose best fleet is known before."""

from dataclasses import dataclass, field

import msgspec
import pytest

from headrace.core.base.request import Slo
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.hardware import Layout
from headrace.core.workload.profiles import WorkloadProfile
from headrace.core.workload.traces import TraceRequest
from headrace.plan.fleet import Kind, Shape
from headrace.plan.presets import presets_with
from headrace.plan.queueing import CHUNKED, SPLIT
from headrace.sim.fleet import FleetQuestion, grown, search_fleet
from headrace.sim.fleet_answer import FleetAnswer
from headrace.sim.fleet_trial import Cut, Fleet, Interval, Traffic, run_fleet, shareable

PRESETS = presets_with(None)
PROFILE = WorkloadProfile(
    name="short",
    purpose="",
    prompt_tokens=1000,
    output_tokens=3,
    slo=Slo(ttft_ms=400.0),
)
TRAFFIC = Traffic(profile=PROFILE, load_per_s=30.0, num_requests=30)


def shape(name: str, usd_per_hour: float, *, speed: float = 1.0, mode: str = CHUNKED) -> Shape:
    """A device of so many H100s in one, but for its memory."""
    h100 = PRESETS.accelerator("H100 SXM")
    accelerator = msgspec.structs.replace(
        h100,
        name=name,
        price_usd_per_hour=usd_per_hour,
        flop_per_s_by_dtype={"bf16": 0.2e15 * speed},
        memory_bytes_per_s=h100.memory_bytes_per_s * speed,
    )
    model = PRESETS.model("Meta-Llama-3.1-8B")
    cost = DataSheetCostModel(model=model, accelerator=accelerator, layout=Layout(tp=1))
    return Shape(decode=Kind(cost), mode=mode)


def ask(*shapes: Shape, **more: object) -> FleetAnswer:
    question = FleetQuestion(
        shapes=shapes, traffic=TRAFFIC, seeds=(0,), policies=("kv",), block_size=64
    )
    return search_fleet(msgspec.structs.replace(question, **more))


def test_the_price_decides_between_equal_devices() -> None:
    """Thirty prompts a second of 80 ms each are work for 2.4 workers, and queues want some more."""
    first = ask(shape("A", 2.0), shape("B", 3.0))
    assert first.best is not None
    assert first.best.accelerator == "A"
    assert 3 <= first.best.decode_workers <= 6
    assert first.best.usd_per_hour == first.best.num_gpus * 2.0
    assert first.best.attainment.mean >= 0.95
    assert any("B TP1" in one.shape and one.constraint == "price" for one in first.refused)
    second = ask(shape("A", 2.0), shape("B", 1.0))
    assert second.best is not None
    assert second.best.accelerator == "B"
    assert second.best.decode_workers == first.best.decode_workers


def test_the_runner_up_is_of_another_shape_and_compared_seed_by_seed() -> None:
    found = ask(shape("A", 2.0), shape("B", 2.1), seeds=(0, 1))
    assert found.best is not None
    assert found.runner_up is not None
    assert "B TP1" in found.runner_up.name
    # The same devices on the same requests: nothing differs but the price.
    assert found.runner_up.more.mean == pytest.approx(0.05)
    assert not found.runner_up.is_within_noise
    assert found.binds is not None
    assert found.binds.constraint == "prefill compute"


def test_the_front_is_what_no_other_beats() -> None:
    found = ask(shape("A", 2.0))
    front = [row for row in found.rows if row.is_on_front]
    goods = [row.attainment.mean for row in front]
    assert goods == sorted(set(goods))
    assert found.best is not None
    assert found.best.name in {row.name for row in front}


def test_equal_seeds_find_equally_and_others_otherwise() -> None:
    assert ask(shape("A", 2.0)) == ask(shape("A", 2.0))
    assert ask(shape("A", 2.0)).rows != ask(shape("A", 2.0), seeds=(7,)).rows


def test_what_never_holds_is_refused_and_there_is_no_best() -> None:
    hurried = msgspec.structs.replace(PROFILE, slo=Slo(ttft_ms=90.0))
    traffic = msgspec.structs.replace(TRAFFIC, profile=hurried)
    found = ask(shape("A", 2.0), traffic=traffic, max_gpus=3)
    assert found.best is None
    assert found.refused[-1].constraint
    assert "do not hold; more than 3 are not allowed" in found.refused[-1].reason
    assert found.is_complete


@dataclass
class Patience:
    """Late after so many questions."""

    left: int
    said: list[str] = field(default_factory=list)

    def is_late(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_a_search_that_runs_out_of_time_says_what_it_knows() -> None:
    patience = Patience(1)
    question = FleetQuestion(shapes=(shape("A", 2.0),), traffic=TRAFFIC, seeds=(0,))
    found = search_fleet(question, patience.said.append, patience.is_late)
    assert not found.is_complete
    assert found.num_runs == len(patience.said) == 1
    assert found.best is not None
    assert found.best.name in patience.said[0]


def pair(prompts: Shape, answers: Shape) -> Shape:
    return Shape(decode=answers.decode, mode=SPLIT, other=prompts.decode)


def test_prompts_go_to_what_computes_and_answers_to_what_is_cheap() -> None:
    """Half of the work is prompts; for answers, a tenth of the arithmetic is enough."""
    profile = msgspec.structs.replace(
        PROFILE, output_tokens=60, slo=Slo(ttft_ms=600.0, tpot_ms=60.0)
    )
    traffic = Traffic(profile=profile, load_per_s=15.0, num_requests=40)
    fast, dull = shape("fast", 4.0, speed=4.0, mode=SPLIT), shape("dull", 0.5, mode=SPLIT)
    found = ask(fast, dull, pair(fast, dull), pair(dull, fast), traffic=traffic, seeds=(0, 1))
    assert found.best is not None
    assert found.best.prefill_worker is not None
    assert found.best.usd_per_hour == pytest.approx(
        found.best.prefill_workers * found.best.prefill_worker.usd_per_hour
        + found.best.decode_workers * found.best.decode_worker.usd_per_hour
    )
    assert found.best.attainment.low is not None
    assert found.binds is not None
    names = [row.name for row in found.rows] + [one.shape for one in found.refused]
    assert any("fast TP1 : dull TP1" in name for name in names)
    unlike = run_fleet(
        msgspec.structs.replace(fleet(1, 2), shape=pair(fast, dull)), traffic, seed=0
    )
    assert not isinstance(unlike, Cut)
    assert unlike.num_handoffs > 0.9 * unlike.num_requests
    alike = run_fleet(msgspec.structs.replace(fleet(1, 2), shape=dull), traffic, seed=0)
    assert not isinstance(alike, Cut)
    # The same answers, behind prompts that are ready four times as soon.
    assert (unlike.ttft_ms.p50 or 0.0) < 0.5 * (alike.ttft_ms.p50 or 0.0)
    assert unlike.tpot_ms.p50 == pytest.approx(alike.tpot_ms.p50, rel=0.2)


def test_pairs_beyond_the_cheapest_are_told_in_one_line() -> None:
    kinds = [shape(name, 2.0, mode=SPLIT) for name in "ABC"]
    pairs = [pair(one, other) for one in kinds for other in kinds if one is not other]
    found = ask(*pairs, num_pairs=0)
    assert [(one.shape, one.constraint) for one in found.refused] == [
        ("6 pairs of unlike workers", "price")
    ]
    assert found.best is None


def staged(pp: int) -> Shape:
    one = shape("A", 2.0)
    assert isinstance(one.decode, Kind)
    cost = msgspec.structs.replace(one.decode.cost, layout=Layout(pp=pp))
    return msgspec.structs.replace(one, decode=Kind(cost))


def test_stages_have_batches_of_their_own() -> None:
    found = ask(staged(1), staged(2))
    assert found.best is not None
    two = run_fleet(msgspec.structs.replace(fleet(0, 2), shape=staged(2)), TRAFFIC, seed=0)
    four = run_fleet(fleet(0, 4), TRAFFIC, seed=0)
    assert not isinstance(two, Cut)
    assert not isinstance(four, Cut)
    # Four engines either way, whose steps are as long but for the way between stages.
    assert two.ttft_ms.p50 == pytest.approx(four.ttft_ms.p50, rel=0.1)


def test_policies_are_tried_on_the_best_fleet() -> None:
    found = ask(shape("A", 2.0), policies=("kv", "round_robin"))
    assert {row.policy for row in found.rows} == {"kv", "round_robin"}
    alone = ask(shape("A", 2.0, speed=20.0), policies=("kv", "round_robin"))
    assert alone.best is not None
    assert alone.best.num_gpus == 1
    assert any("every policy does the same" in one.reason for one in alone.refused)


def fleet(prefill: int, decode: int) -> Fleet:
    mode = SPLIT if prefill else CHUNKED
    return Fleet(
        shape=shape("A", 2.0, mode=mode),
        prefill_workers=prefill,
        decode_workers=decode,
        policy="kv",
        step_tokens=2048,
        block_size=64,
    )


def test_a_split_hands_kv_over_and_grows_where_misses_are() -> None:
    run = run_fleet(fleet(4, 1), TRAFFIC, seed=0)
    assert not isinstance(run, Cut)
    # Answers of one token end where their prompt was computed.
    assert 0.5 * run.num_requests < run.num_handoffs <= run.num_requests
    more = grown(fleet(1, 1), {"tpot": {"decode": 3}, "ttft": {"queue": 1}})
    assert (more.prefill_workers, more.decode_workers) == (1, 2)
    more = grown(fleet(4, 4), {"ttft": {"queue": 2}})
    assert (more.prefill_workers, more.decode_workers) == (6, 4)


def test_a_hopeless_run_is_cut_short() -> None:
    may_miss = TRAFFIC.num_may_miss(0.9)
    assert may_miss == 4  # of 30 or some more
    assert TRAFFIC.num_may_miss(0.9, 3) == 11  # of 90 or some more
    run = run_fleet(fleet(0, 1), TRAFFIC, seed=0, num_may_miss=may_miss)
    assert isinstance(run, Cut)
    assert sum(run.misses["ttft"].values()) == may_miss + 1


def test_sessions_come_as_often_as_said_while_they_are_counted() -> None:
    profile = msgspec.structs.replace(PROFILE, turns=3, pause_s=2.0, prompt_tokens=300)
    traffic = Traffic(profile=profile, load_per_s=20.0, num_requests=200)
    assert traffic.warm_up_s == 4.0
    run = run_fleet(fleet(0, 4), traffic, seed=1)
    assert not isinstance(run, Cut)
    assert run.num_requests == pytest.approx(200, rel=0.25)
    assert run.hit_rate > 0.3
    assert traffic.demand.cached_share > 0.3


def test_a_trace_is_a_traffic_that_knows_what_it_shares() -> None:
    trace = [
        TraceRequest(
            arrival_s=100.0 + i, prompt_tokens=600, output_tokens=2, blocks=(0, i), block_tokens=512
        )
        for i in range(1, 21)
    ]
    assert shareable(trace) == pytest.approx(19 * 512 / (20 * 600))
    traffic = Traffic.of_trace(trace, Slo(ttft_ms=500.0))
    assert traffic.load_per_s == pytest.approx(20 / 19)
    run = run_fleet(fleet(0, 2), traffic, seed=0)
    assert not isinstance(run, Cut)
    assert run.num_requests == traffic.num_counted == 18
    assert run.hit_rate > 0.8


def test_an_interval_widens_with_fewer_seeds() -> None:
    assert Interval.of([3.0]) == Interval(3.0, None, None)
    few, many = Interval.of([1.0, 3.0]), Interval.of([1.0, 3.0] * 20)
    assert few.low == pytest.approx(2.0 - 12.706)
    # Student's t of 11 degrees of freedom; the deviation of 1 and 3 by turns is sqrt(12 / 11).
    dozen = Interval.of([1.0, 3.0] * 6)
    assert dozen.low == pytest.approx(2.0 - 2.201 * (12 / 11) ** 0.5 / 12**0.5)
    assert many.low is not None
    assert 1.6 < many.low < 2.0
