"""Bounds on fleets: what is refused before anything is simulated, and where a search begins."""

import msgspec
import pytest

from headrace.core.base.request import Slo
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.hardware import Layout
from headrace.plan.fleet import MODES, Bound, Constraint, Demand, Refusal, Shape, bound, every_shape
from headrace.plan.presets import presets_with
from headrace.plan.queueing import CHUNKED, SPLIT

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
    return Shape(cost=cost, mode=CHUNKED)


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


def test_every_shape_once() -> None:
    shapes = list(every_shape([shape().cost], (1, 2), MODES))
    assert len({str(one) for one in shapes}) == len(shapes) == 6
