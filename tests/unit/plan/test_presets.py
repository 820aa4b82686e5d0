"""The tables agree with themselves, and an operator's own rows are as good."""

from pathlib import Path

import pytest

from headrace.core.base.errors import ConfigError
from headrace.plan.presets import ModelRow, package_presets, presets_with, read_table

OWN = """
[accelerators.Mine]
bf16_tflop_per_s = 100
memory_gb = 48
memory_tb_per_s = 1.5

[models.tiny]
params_b = 0.1
layers = 4
hidden = 256
heads = 4
kv_heads = 2
head_dim = 64
vocab = 1000
"""


def test_shapes_reproduce_the_active_parameters() -> None:
    rows = list(read_table("models.csv", ModelRow))
    assert len(rows) == 34
    for row in rows:
        assert row.active_params_b is not None
        active_b = row.build().active_params / 1e9
        assert active_b == pytest.approx(row.active_params_b, abs=2e-4), row.name


def test_known_sizes() -> None:
    presets = package_presets()
    assert presets.model("Meta-Llama-3.1-70B").kv_elems_per_token * 2 == 327_680
    assert presets.model("deepseek-v3").kv_elems_per_token * 2 == 70_272
    h100 = presets.accelerator("h100-sxm")
    assert round(h100.ridge_flop_per_byte("bf16"), 1) == 295.2
    assert h100.ridge_flop_per_byte("fp8") == 2 * h100.ridge_flop_per_byte("bf16")


def test_all_devices_are_complete() -> None:
    for device in package_presets().accelerators.values():
        assert device.source
        assert device.flop_per_s("fp4") >= device.flop_per_s("bf16") > 0


def test_own_rows(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(OWN)
    presets = presets_with(str(file))
    assert presets.accelerator("mine").memory_bytes == 48e9
    assert presets.model("tiny").kv_elems_per_token == 2 * 4 * 2 * 64
    assert presets.accelerator("H100 SXM") == package_presets().accelerator("H100 SXM")


def test_all_faults_of_a_file_are_told(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(OWN.replace("48", "0").replace("heads = 4", "haeds = 4") + "\n[x]\n")
    with pytest.raises(ConfigError) as caught:
        presets_with(str(file))
    text = str(caught.value)
    assert "unknown table [x]" in text
    assert "memory_gb=0" in text
    assert "haeds" in text


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("params_b = 0.1", "params_b = 0.0001", "tables and experts alone"),
        ("params_b = 0.1", "params_b = nan", "params_b=nan"),
        ("memory_tb_per_s = 1.5", "memory_tb_per_s = inf", "memory_tb_per_s=inf"),
        ("vocab = 1000", "vocab = 1000\nwindow_layers = 5", "window_layers is more than layers"),
        ("vocab = 1000", "vocab = 1000\nexperts = 4", "top_k=0"),
        ("memory_gb = 48", "memory_gb = 48\nscaleup_gb_per_s = -1", "scaleup_gb_per_s=-1"),
        ("memory_gb = 48", "memory_gb = 48e9", "memory_gb=4.8e.10 .at most 1e.07"),
        ("params_b = 0.1", "params_b = 100e6", "params_b=1e.08 .at most 100000"),
        ("memory_tb_per_s = 1.5", "memory_tb_per_s = 1500", "so much arithmetic .*=1500"),
        ("layers = 4", "layers = " + "9" * 400, "layers=1e.300 .at most 10000"),
        ("hidden = 256", "hidden = 10000000", "hidden=1e.07 .at most 1e.06"),
        ("memory_gb = 48", "memory_gb = " + "9" * 400, r"accelerators.Mine"),
        ("memory_gb = 48", "memory_gb = 48\nprice_usd_per_hour = inf", "price_usd_per_hour=inf"),
        ("[models.tiny]", "[models]\nother = 3\n[models.tiny]", r"must be a table, .models.other"),
        (OWN, "models = 3", r"models must be tables, as .models.NAME"),
        (OWN, "accelerators = [1]", r"accelerators must be tables"),
    ],
)
def test_rows_that_cannot_be(tmp_path: Path, before: str, after: str, told: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(OWN.replace(before, after))
    with pytest.raises(ConfigError, match=told):
        presets_with(str(file))


@pytest.mark.parametrize("name", ["none.toml", "broken.toml"])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "broken.toml").write_text("[[[")
    with pytest.raises(ConfigError, match=name):
        presets_with(str(tmp_path / name))


def test_what_is_unknown_names_what_is_near() -> None:
    with pytest.raises(ConfigError, match="H200 SXM"):
        package_presets().accelerator("h200")


def test_what_is_near_nothing_names_each_model_once() -> None:
    with pytest.raises(ConfigError) as caught:
        package_presets().model("!")
    names = caught.value.hint.removeprefix("known: ").split(", ")
    assert len(names) == 34
    assert "Meta-Llama-3.1-8B" in names
