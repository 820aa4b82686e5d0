"""Layouts use every device and fit; rules of thumb are what the numbers make of them."""

import msgspec
import pytest

from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.hardware import Layout
from headrace.core.workload.profiles import CHAT
from headrace.plan.engines import Engine
from headrace.plan.parallel import ParallelAnswer, compute_parallel, every_layout
from headrace.plan.presets import package_presets

PRESETS = package_presets()


def asked(
    model: str,
    *,
    gpu: str = "H100 SXM",
    num_gpus: int = 16,
    concurrency: int = 64,
    weights: str = "fp8",
    engine: str = "vllm",
) -> ParallelAnswer:
    found = Engine.named(engine)
    cost = DataSheetCostModel(
        model=PRESETS.model(model),
        accelerator=PRESETS.accelerator(gpu),
        weight_dtype=weights,
        efficiency=found.efficiency,
    )
    return compute_parallel(cost, CHAT, num_gpus=num_gpus, concurrency=concurrency, engine=found)


def test_every_layout_uses_every_device() -> None:
    layouts = list(every_layout(PRESETS.model("DeepSeek-V3"), 16))
    assert {layout.num_gpus for layout in layouts} == {16}
    assert all(layout.ep in (1, layout.tp * layout.dp) for layout in layouts)
    assert len({str(layout) for layout in layouts}) == len(layouts)
    assert Layout(tp=4, dp=4, ep=16) in layouts


def test_ranks_divide_the_heads() -> None:
    found = asked("Qwen2.5-14B", num_gpus=3, weights="bf16")  # 40 heads
    assert {one.layout.tp for one in found.layouts} == {1}


def test_what_does_not_fit_is_counted_and_left_out() -> None:
    found = asked("Meta-Llama-3.1-70B", weights="bf16", num_gpus=4)
    assert all(one.layout.tp * one.layout.pp >= 2 for one in found.layouts)
    assert found.num_layouts_too_small >= 1
    assert asked("DeepSeek-V3", num_gpus=1).layouts == ()


def test_layouts_come_with_most_tokens_first_and_agree_with_themselves() -> None:
    found = asked("Meta-Llama-3.1-70B")
    rates = [one.output_tokens_per_s for one in found.layouts]
    assert rates == sorted(rates, reverse=True)
    for one in found.layouts:
        assert one.output_tokens_per_s == pytest.approx(16 * one.output_tokens_per_s_per_gpu)
        per_hour = one.output_tokens_per_s * 3600
        assert one.usd_per_million_output_tokens == pytest.approx(16 * 2.95 / per_hour * 1e6)
        assert one.link_share == 0 or one.layout.num_gpus > one.layout.dp


def test_ranks_beyond_the_fast_links_are_slow() -> None:
    rules = {rule.rule: rule for rule in asked("Meta-Llama-3.1-70B").rules}
    within = rules["tensor parallelism stays within the domain of fast links"]
    assert within.is_confirmed
    assert "TP16" in within.numbers
    assert not rules["the most tensor parallel ranks give the lowest TPOT"].is_confirmed


def test_a_rule_may_hold_at_one_load_and_not_at_another() -> None:
    rule = "the smallest replica that fits gives the most tokens"
    few = {r.rule: r.is_confirmed for r in asked("Meta-Llama-3.1-8B", concurrency=8).rules}
    many = {r.rule: r.is_confirmed for r in asked("Meta-Llama-3.1-8B", concurrency=4096).rules}
    assert (few[rule], many[rule]) == (False, True)


def test_devices_without_a_network_stay_in_their_domain() -> None:
    found = asked("Meta-Llama-3.1-8B", gpu="RTX 4090", num_gpus=16)
    assert found.layouts
    assert all(one.layout.tp * one.layout.pp <= 8 for one in found.layouts)


def test_json_holds_everything() -> None:
    figures = msgspec.to_builtins(asked("gpt-oss-120b", num_gpus=8, weights="fp4"))
    assert figures["provenance"]["extrapolates"]
    assert any(one["layout"]["ep"] > 1 for one in figures["layouts"])
    assert any("experts" in rule["rule"] for rule in figures["rules"])
