"""Bounds on fleets: what is refused before anything is simulated, and where a search begins."""

import msgspec
import pytest

from headrace.core.base.request import Slo
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.hardware import Layout
from headrace.plan.fleet import (
    MODES,
    Bound,
    Constraint,
    Demand,
    Kind,
    Refusal,
    Shape,
    bound,
    every_layout,
    every_shape,
)
from headrace.plan.presets import presets_with
from headrace.plan.queueing import CHUNKED, SPLIT
from headrace.plan.steps import num_seqs_that_fit

PRESETS = presets_with(None)
DEMAND = Demand(
    load_per_s=20.0,
    prompt_tokens=2000,
    output_tokens=200,
    cached_share=0.0,
    slo=Slo(ttft_ms=1000.0, tpot_ms=50.0),
)


def shape(model: str = "Meta-Llama-3.1-8B", gpu: str = "H100 SXM", tp: int = 1) -> Shape:
    cost = DataSheetCostModel(
        model=PRESETS.model(model), accelerator=PRESETS.accelerator(gpu), layout=Layout(tp=tp)
    )
    return Shape(decode=Kind(cost), mode=CHUNKED)


def limited(**limits: float) -> Demand:
    return msgspec.structs.replace(DEMAND, slo=Slo(**limits))


@pytest.mark.parametrize(
    ("one", "demand", "constraint", "words"),
    [
        (shape("Meta-Llama-3.1-70B"), DEMAND, "memory", "weights take 141.1 of 80 GB"),
        (shape(gpu="H100 PCIe"), DEMAND, "price", "--price"),
        (shape(tp=3), DEMAND, "layout", "TP 3 does not divide 32 heads"),
        (shape(gpu="RTX 4090", tp=16), DEMAND, "link", "no link joins TP16"),
        (shape(), limited(ttft_ms=10.0), "prefill compute", "TTFT may be 10"),
        (shape(), limited(tpot_ms=2.0), "decode bandwidth", "TPOT may be 2"),
        (shape(), limited(e2e_ms=500.0), "decode bandwidth", "E2E may be 500"),
    ],
)
def test_what_can_never_do_is_refused_with_its_reason(
    one: Shape, demand: Demand, constraint: str, words: str
) -> None:
    found = bound(one, demand)
    assert isinstance(found, Refusal)
    assert found.constraint == constraint
    assert words in found.reason


def found_bound(one: Shape, demand: Demand) -> Bound:
    found = bound(one, demand)
    assert isinstance(found, Bound)
    return found


def test_the_bound_is_the_work_over_what_a_worker_does() -> None:
    few, many = (
        found_bound(shape(), msgspec.structs.replace(DEMAND, load_per_s=load))
        for load in (20.0, 200.0)
    )
    assert many.workers_needed == pytest.approx(10 * few.workers_needed)
    # 2000 tokens of 15e9 FLOP take 30 ms of a device; decoding reads memory beside it.
    assert 0.5 < few.workers_needed < 1.0
    assert (few.num_workers, few.prefill_workers) == (1, 0)
    assert many.usd_per_hour == many.num_workers * 2.95
    assert many.constraint is Constraint.PREFILL_COMPUTE


def test_a_split_needs_a_worker_of_each_kind() -> None:
    split = msgspec.structs.replace(shape(), mode=SPLIT)
    found = found_bound(split, DEMAND)
    assert (found.prefill_workers, found.decode_workers) == (1, 1)
    alone = found_bound(shape(), DEMAND)
    assert found.workers_needed > alone.workers_needed  # nothing overlaps


def test_what_caches_hold_need_not_be_computed() -> None:
    cached = found_bound(shape(), msgspec.structs.replace(DEMAND, cached_share=0.8))
    assert cached.workers_needed < found_bound(shape(), DEMAND).workers_needed
    assert cached.constraint is Constraint.MEMORY  # which is what keeps batches from growing


def test_memory_limits_who_decodes_together() -> None:
    long = msgspec.structs.replace(DEMAND, prompt_tokens=20_000, cached_share=0.99, load_per_s=9.0)
    found = found_bound(shape(gpu="A100 SXM 80GB"), long)
    assert found.decode_seqs < 30
    assert found.constraint is Constraint.MEMORY


def cost_of(one: Shape) -> DataSheetCostModel:
    assert isinstance(one.decode, Kind)
    return one.decode.cost


def kind(gpu: str, **sizes: int) -> Kind:
    cost = cost_of(shape("deepseek-v3", gpu))
    return Kind(msgspec.structs.replace(cost, layout=Layout(**sizes), weight_dtype="fp8"))


def test_every_shape_once() -> None:
    costs = [cost_of(shape()), cost_of(shape(gpu="A100 SXM 80GB"))]
    layouts = list(every_layout((1, 2), (1, 2), (1,)))
    shapes = list(every_shape(costs, layouts, MODES))
    assert len({str(one) for one in shapes}) == len(shapes) == 8 * 3 + 8 * 7
    assert not any(one.is_pair for one in every_shape(costs, layouts, (CHUNKED,)))


def test_ranks_that_share_experts_are_whole_replicas() -> None:
    assert list(every_layout((1, 3), (1,), (1, 8))) == [
        Layout(),
        Layout(ep=8, dp=8),
        Layout(tp=3),
    ]


def test_what_a_worker_of_several_engines_is() -> None:
    stages, experts = kind("H200 SXM", tp=4, pp=2), kind("H200 SXM", tp=1, ep=8, dp=8)
    assert (stages.num_gpus, stages.num_engines) == (8, 2)
    assert (experts.num_gpus, experts.num_engines) == (8, 8)
    assert stages.usd_per_hour == experts.usd_per_hour
    # Stages share the memory out to batches, replicas have memory each.
    assert stages.seqs_that_fit(4000) == num_seqs_that_fit(stages.cost, 4000) // 2
    assert experts.seqs_that_fit(4000) == num_seqs_that_fit(experts.cost, 4000)
    assert (str(stages), str(experts)) == ("H200 SXM TP4 PP2", "H200 SXM TP1 EP8")


def test_twice_the_stages_serve_about_twice_as_much() -> None:
    """As many batches are under way as there are stages, each as long as all stages take."""
    eight, sixteen = (
        found_bound(Shape(decode=kind("H200 SXM", tp=8, pp=pp), mode=CHUNKED), DEMAND)
        for pp in (1, 2)
    )
    assert sixteen.workers_needed == pytest.approx(eight.workers_needed / 2, rel=0.25)


def test_a_pair_has_the_bound_of_either_side_and_its_price() -> None:
    fast, cheap = shape(gpu="H100 SXM").decode, shape(gpu="A100 SXM 80GB").decode
    alike = {
        one: found_bound(Shape(decode=one_kind, mode=SPLIT), DEMAND)
        for one, one_kind in (("fast", fast), ("cheap", cheap))
    }
    pair = found_bound(Shape(decode=cheap, mode=SPLIT, other=fast), DEMAND)
    assert pair.prefill_workers == alike["fast"].prefill_workers
    assert pair.decode_workers == alike["cheap"].decode_workers
    assert pair.usd_per_hour == pytest.approx(
        pair.prefill_workers * fast.usd_per_hour + pair.decode_workers * cheap.usd_per_hour
    )
    assert pair.prefill_needed == alike["fast"].prefill_needed
    assert 0.0 < pair.usd_needed <= pair.usd_per_hour
    slow = bound(Shape(decode=fast, mode=SPLIT, other=cheap), limited(ttft_ms=60.0))
    assert isinstance(slow, Refusal)
    assert slow.constraint == "prefill compute"


def test_what_one_side_cannot_do_a_pair_cannot() -> None:
    large, small = shape("Meta-Llama-3.1-70B", tp=2).decode, shape("Meta-Llama-3.1-70B").decode
    for one, other in ((large, small), (small, large)):
        found = bound(Shape(decode=one, mode=SPLIT, other=other), DEMAND)
        assert isinstance(found, Refusal)
        assert found.constraint == "memory"
