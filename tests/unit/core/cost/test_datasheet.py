"""A data sheet's steps keep the laws of a cost, and layouts divide what they say they divide."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.base.errors import InvariantError
from headrace.core.cost.datasheet import DataSheetCostModel, Exchange
from headrace.core.cost.fitted import Link
from headrace.core.cost.hardware import Accelerator, Efficiency, Layout, ModelShape
from headrace.core.cost.model import CostModel, StepShape

DENSE = ModelShape(
    name="dense",
    num_layers=10,
    hidden=1000,
    num_params=1.2e9,
    embed_params=1e8,
    logit_params=1e8,
    kv_elems_per_token=20_000.0,
    kv_ways=4,
    attention_flop_per_pair=40_000.0,
)
MOE = msgspec.structs.replace(
    DENSE, expert_params=1e7, num_experts=64, experts_per_token=4, num_moe_layers=8
)
DEVICE = Accelerator(
    name="device",
    flop_per_s_by_dtype={"bf16": 1e15, "fp8": 2e15},
    memory_bytes=80e9,
    memory_bytes_per_s=2e12,
    scaleup_bytes_per_s=4e11,
    scaleup_gpus=8,
    scaleout_bytes_per_s=5e10,
)
COST = DataSheetCostModel(model=DENSE, accelerator=DEVICE)


def decode(num_seqs: int, context: int) -> StepShape:
    kv = num_seqs * context
    return StepShape(num_seqs, num_seqs, num_seqs, kv, kv)


def test_it_is_a_cost_model() -> None:
    cost: CostModel = msgspec.structs.replace(COST, links={"nvlink": Link(1000.0, 0.01)})
    assert cost.step_ns(decode(1, 100)) == 1_102_000  # 2.2 GB of weights and 4 MB of KV at 2 TB/s
    assert cost.copy_ns(100_000, "nvlink") == 2000
    with pytest.raises(InvariantError):
        cost.copy_ns(1, "pigeon")


@given(st.integers(1, 300), st.integers(1, 100_000), st.integers(0, 5))
def test_a_run_of_decode_steps_takes_what_each_of_them_takes(
    num_seqs: int, context: int, num_steps: int
) -> None:
    windowed = msgspec.structs.replace(DENSE, window_share=0.5, window_tokens=512)
    for model in (DENSE, MOE, windowed):
        cost = msgspec.structs.replace(COST, model=model)
        each = [cost.step_ns(decode(num_seqs, context + more)) for more in range(num_steps)]
        assert cost.decode_ns(decode(num_seqs, context), num_steps) == each


@given(st.integers(1, 4096), st.integers(1, 100_000), st.integers(1, 64))
def test_more_work_never_costs_less(num_seqs: int, context: int, more: int) -> None:
    for model in (DENSE, MOE):
        cost = msgspec.structs.replace(COST, model=model)
        assert cost.step_ns(decode(num_seqs + more, context)) >= cost.step_ns(
            decode(num_seqs, context)
        )


@pytest.mark.parametrize(("tp", "kv_part"), [(1, 1), (2, 2), (4, 4), (8, 4)])
def test_kv_is_divided_by_no_more_than_its_heads(tp: int, kv_part: int) -> None:
    cost = msgspec.structs.replace(COST, layout=Layout(tp=tp))
    work, whole = cost.work(decode(8, 100)), COST.work(decode(8, 100))
    assert work.kv_bytes * kv_part == whole.kv_bytes
    assert work.weight_bytes * tp == pytest.approx(whole.weight_bytes)
    assert work.flop * tp == pytest.approx(whole.flop)


def test_a_ring_moves_what_it_must() -> None:
    cost = msgspec.structs.replace(
        COST, layout=Layout(tp=4), efficiency=Efficiency(collective_ns=1000.0)
    )
    work = cost.work(decode(8, 100))
    assert work.exchanges == [Exchange(4, 20, 1.5 * 8 * 1000 * 2)]  # two sums in every layer
    assert work.link_bytes == 20 * 2 * 3 / 4 * 8 * 1000 * 2
    assert cost.times(decode(8, 100)).link_ns == pytest.approx(20_000 + work.link_bytes / 400)


def test_beyond_its_domain_a_ring_is_as_slow_as_the_network() -> None:
    near = msgspec.structs.replace(COST, layout=Layout(tp=8)).times(decode(64, 100)).link_ns
    far = msgspec.structs.replace(COST, layout=Layout(tp=16)).times(decode(64, 100)).link_ns
    assert far / near == pytest.approx(8 * (15 / 16) / (7 / 8))


def test_only_the_hand_over_between_stages_leaves_the_domain() -> None:
    """Eight ranks that sum stay together; rows cross the network once."""
    one = msgspec.structs.replace(COST, layout=Layout(tp=8)).times(decode(64, 100)).link_ns
    two = msgspec.structs.replace(COST, layout=Layout(tp=8, pp=2)).times(decode(64, 100)).link_ns
    assert two - one == pytest.approx(64 * 1000 * 2 / 5e10 * 1e9)


def test_a_batch_reads_the_experts_that_it_chooses() -> None:
    assert MOE.experts_read(1) == pytest.approx(4)
    assert MOE.experts_read(2) == pytest.approx(4 + 4 * 60 / 64)
    assert MOE.experts_read(10_000) == pytest.approx(64)
    assert DENSE.experts_read(100) == 0


def test_whole_experts_are_spread_over_all_ranks_of_a_stage() -> None:
    sliced = msgspec.structs.replace(COST, model=MOE, layout=Layout(tp=4, dp=2))
    whole = msgspec.structs.replace(COST, model=MOE, layout=Layout(tp=4, dp=2, ep=8))
    assert sliced.weight_bytes_per_gpu() == pytest.approx(1.2e9 / 4 * 2)
    assert whole.weight_bytes_per_gpu() == pytest.approx((5.6e8 / 4 + 6.4e8 / 8) * 2)
    # Experts see the tokens of both replicas, on twice as many ranks.
    assert whole.work(decode(8, 100)).flop == pytest.approx(sliced.work(decode(8, 100)).flop)
    # Sums after attention everywhere, after the feed-forward part in the two dense layers only.
    assert [each.num for each in whole.work(decode(8, 100)).exchanges] == [10 + 2, 2 * 8]


def test_a_window_bounds_kv_and_attention() -> None:
    model = msgspec.structs.replace(DENSE, window_tokens=100, window_share=0.5)
    assert model.kv_elems_held(100) == DENSE.kv_elems_held(100)
    assert model.kv_elems_held(1000) == 20_000 * (500 + 50)
    assert model.attention_flop(1000.0 * 1000, 1000) == 40_000 * (500_000 + 50_000)


def test_a_latent_is_attended_to_without_expanding_it_only_to_decode() -> None:
    model = msgspec.structs.replace(DENSE, latent_flop_per_pair=90_000.0)
    assert model.attention_flop(10, 10) == 400_000
    assert model.attention_flop(10, 10, is_decode=True) == 900_000


def test_multiplications_run_in_the_narrowest_type_that_the_device_has() -> None:
    rates = {dtype: DEVICE.flop_per_s(dtype) for dtype in ("bf16", "fp8", "fp4", "int4")}
    assert rates == {"bf16": 1e15, "fp8": 2e15, "fp4": 2e15, "int4": 1e15}


def test_pipeline_stages_divide_what_is_stored_and_not_the_way() -> None:
    piped = msgspec.structs.replace(COST, layout=Layout(pp=2))
    assert piped.weight_bytes_per_gpu() == COST.weight_bytes_per_gpu() / 2
    assert piped.kv_bytes_per_gpu(100) == COST.kv_bytes_per_gpu(100) / 2
    assert piped.step_ns(decode(8, 100)) > COST.step_ns(decode(8, 100))
