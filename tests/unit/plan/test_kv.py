"""Bytes of keys and values by kind of attention, and what they leave room for."""

import msgspec
import pytest

from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.hardware import Layout
from headrace.plan.kv import KvAnswer, compute_kv
from headrace.plan.presets import package_presets
from headrace.plan.reference import REFERENCE_70B_H100


def asked(model: str, *, weights: str = "bf16", gpu: str = "H200 SXM") -> KvAnswer:
    presets = package_presets()
    cost = DataSheetCostModel(
        model=presets.model(model), accelerator=presets.accelerator(gpu), weight_dtype=weights
    )
    return compute_kv(cost, [Layout(tp=tp) for tp in (1, 2, 8, 16)], [1000, 100_000])


@pytest.mark.parametrize(
    ("model", "kind", "bf16_bytes"),
    [
        ("Meta-Llama-3.1-70B", "GQA, 8 KV heads", 327_680),
        ("SmolLM2-1.7B", "MHA", 196_608),
        ("DeepSeek-V3", "MLA", 70_272),
        ("gpt-oss-120b", "GQA, 8 KV heads, window of 128 in 50% of layers", 73_728),
    ],
)
def test_a_token_by_kind_of_attention(model: str, kind: str, bf16_bytes: int) -> None:
    found = asked(model)
    assert found.attention == kind
    assert found.kv_bytes_per_token_by_dtype["bf16"] == bf16_bytes
    assert found.kv_bytes_per_token_by_dtype["fp8"] * 2 == bf16_bytes


@pytest.mark.parametrize(
    ("model", "tp", "told"),
    [
        ("phi-4", 2, ""),
        ("phi-4", 4, "TP 4 neither divides 10 KV heads nor is a multiple of them"),
        ("phi-4", 20, ""),
        ("qwen2.5-7b", 7, "TP 7 neither divides 4 KV heads nor is a multiple of them"),
        ("deepseek-v3", 64, ""),
    ],
)
def test_kv_heads_are_divided_evenly_or_copied_evenly(model: str, tp: int, told: str) -> None:
    assert package_presets().model(model).layout_fault(Layout(tp=tp)) == told


def test_a_window_keeps_long_requests_small() -> None:
    found = asked("gpt-oss-120b").kv_bytes_per_request_by_tokens
    assert found[1000] == 73_728 / 2 * (1000 + 128)
    assert found[100_000] == 73_728 / 2 * (100_000 + 128)


def test_more_ranks_than_kv_heads_hold_copies() -> None:
    rows = {row.layout: row for row in asked("Meta-Llama-3.1-70B").layouts}
    assert [row.num_kv_copies for row in rows.values()] == [1, 1, 1, 2]
    assert rows["TP16"].kv_bytes_per_token_per_gpu == rows["TP8"].kv_bytes_per_token_per_gpu
    latent = {row.layout: row.num_kv_copies for row in asked("DeepSeek-V3").layouts}
    assert latent["TP8"] == 8


def test_what_fits_fills_the_room_and_no_more() -> None:
    found = asked("Meta-Llama-3.1-8B")
    for row in found.layouts:
        for tokens, num_seqs in row.num_seqs_by_tokens.items():
            one = tokens * row.kv_bytes_per_token_per_gpu
            assert num_seqs * one <= row.kv_room_bytes_per_gpu < (num_seqs + 1) * one


def test_weights_without_room_are_told() -> None:
    found = compute_kv(REFERENCE_70B_H100, [Layout(), Layout(tp=4)], [1000])
    assert found.warnings == ("1 GPU: 140 GB of weights leave no room on one 80 GB H100",)
    assert [row.num_seqs_by_tokens[1000] for row in found.layouts] == [0, 875]
    assert msgspec.json.encode(found)
