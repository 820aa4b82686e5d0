"""The roofline prints what the reference page prints, and says when things cannot be."""

import msgspec
import pytest

from headrace.core.cost.hardware import Layout
from headrace.plan.engines import Engine
from headrace.plan.presets import package_presets
from headrace.plan.reference import REFERENCE_70B_H100
from headrace.plan.roofline import Roofline, compute_roofline


def reference(prompt: int = 2048, output: int = 512, batch: int = 8) -> Roofline:
    return compute_roofline(
        REFERENCE_70B_H100,
        prompt_tokens=prompt,
        output_tokens=output,
        batch_seqs=batch,
        engine=Engine(),
    )


def test_every_printed_digit_of_the_reference() -> None:
    found = reference()
    assert f"{found.ridge_flop_per_byte:.0f}" == "295"
    assert f"{found.prefill.intensity_flop_per_byte / 1000:.1f}k" == "16.1k"
    assert f"{found.context_tokens:,.0f}" == "2,304"
    assert f"{found.decode.intensity_flop_per_byte:.1f}" == "7.8"
    assert f"{found.ttft_s:.2f}" == "2.32"
    assert f"{found.tpot_s * 1000:.1f}" == "42.7"
    assert f"{found.e2e_s:.2f}" == "24.17"
    assert f"{found.prefill.memory_utilisation:.0%}" == "2%"
    assert f"{found.decode.compute_utilisation:.0%}" == "3%"
    assert (found.prefill.bound, found.decode.bound) == ("compute", "memory")
    assert found.prefill.flop == pytest.approx(2.29376e15)


def test_the_figures_behind_the_printed_digits() -> None:
    found = reference()
    assert found.ridge_flop_per_byte == pytest.approx(295.22, abs=0.005)
    assert found.prefill.intensity_flop_per_byte == pytest.approx(16_082.9, abs=0.05)
    assert found.decode.intensity_flop_per_byte == pytest.approx(7.835, abs=5e-4)
    assert found.ttft_s == pytest.approx(2.3193, abs=5e-5)
    assert found.tpot_s == pytest.approx(0.042671, abs=5e-7)
    assert found.e2e_s == pytest.approx(24.1670, abs=5e-5)
    assert found.prefill.memory_utilisation == pytest.approx(0.0184, abs=5e-5)
    assert found.decode.compute_utilisation == pytest.approx(0.0265, abs=5e-5)


def test_a_rate_nearby_would_print_another_ridge() -> None:
    accelerator = REFERENCE_70B_H100.accelerator
    faster = msgspec.structs.replace(
        accelerator,
        flop_per_s_by_dtype=dict.fromkeys(accelerator.flop_per_s_by_dtype, 990e12),
    )
    wrong = msgspec.structs.replace(REFERENCE_70B_H100, accelerator=faster)
    found = compute_roofline(
        wrong, prompt_tokens=2048, output_tokens=512, batch_seqs=8, engine=Engine()
    )
    assert f"{found.ridge_flop_per_byte:.0f}" == "296"


def test_the_weights_of_the_reference_do_not_fit() -> None:
    assert reference().warnings == ("140 GB of weights do not fit one 80 GB H100",)


def test_weights_that_fit_may_leave_no_room_for_kv() -> None:
    cost = msgspec.structs.replace(REFERENCE_70B_H100, layout=Layout(tp=2))
    big = compute_roofline(
        cost, prompt_tokens=8192, output_tokens=512, batch_seqs=64, engine=Engine()
    )
    assert big.warnings == ("70 GB of weights and 45 GB of KV do not fit one 80 GB H100 together",)


def test_a_fit_says_where_it_extrapolates() -> None:
    presets, engine = package_presets(), Engine.named("vllm")
    cost = msgspec.structs.replace(
        REFERENCE_70B_H100,
        model=presets.model("DeepSeek-V3"),
        accelerator=presets.accelerator("MI300X"),
        layout=Layout(tp=8, pp=2),
        weight_dtype="int4",
        efficiency=engine.efficiency,
    )
    told = engine.provenance(cost, concurrency=9999, context_tokens=1e6)
    assert told.kind == "fitted"
    assert [beyond.split(":")[0] for beyond in told.extrapolates] == [
        "experts",
        "accelerator MI300X",
        "int4 weights",
        "TP8 PP2",
        "9999 sequences",
        "contexts of 1e+06 tokens",
    ]
    assert Engine().provenance(cost, concurrency=1, context_tokens=1).kind == "data sheet"
