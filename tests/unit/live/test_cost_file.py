"""A calibration comes back as it was written; what is none is refused by name."""

from pathlib import Path

import pytest

from headrace.core.base.errors import ConfigError
from headrace.core.cost.fitted import Link
from headrace.live.cost_file import read_calibration, write_calibration
from support.calibrations import calibration_of


def test_round_trip(tmp_path: Path) -> None:
    calibration = calibration_of(kv_link=Link(1e6, 2e4))
    write_calibration(tmp_path / "cost.json", calibration)
    assert read_calibration(tmp_path / "cost.json") == calibration


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda text: "", "is no calibration"),
        (lambda text: "[1, 2]", "is no calibration"),
        (lambda text: '{"a":' * 100_000, "is no calibration"),
        (lambda text: text.replace("hrcost1", "hrcost9"), "format 'hrcost9'.*reads 'hrcost1'"),
        (lambda text: text.replace('"knot_ns": [', '"knot_ns": [-1,'), "damaged"),
        (lambda text: text.replace('"slow_down"', '"slow_dawn"'), "damaged.*slow_dawn"),
        (lambda text: text.replace('"host_share": 0.01', '"host_share": "much"'), "damaged"),
        (lambda text: text.replace('"host_share": 0.01', '"host_share": -3'), "host_share is -3"),
        (
            lambda text: text.replace('"num_workers": 2', f'"num_workers": {1 << 62}'),
            r"num_workers is 4\.6",
        ),
        (lambda text: text.replace('"mean": 0.1', '"mean": -0.1'), "mean error is -0.1"),
        (lambda text: text.replace('"block_size": 16', '"block_size": 0'), "block_size is 0"),
        (lambda text: text.replace('"num_blocks": 4096', '"num_blocks": -1'), "num_blocks is -1"),
        (lambda text: text.replace('"budget": "itl"', '"budget": "no"'), "budget is 'no'"),
        (lambda text: text.replace('"step_tokens": 512', '"step_tokens": 0'), "step_tokens is 0"),
        (lambda text: text.replace('"num_seqs": 16', '"num_seqs": -16'), "num_seqs is -16"),
        (lambda text: text.replace('"seq_ns": 20000.0', '"seq_ns": 1e300'), "ns of a step is 1e"),
        (
            lambda text: text.replace('"kv_link": null', '"kv_link": {"latency_ns": -1}'),
            "damaged",
        ),
        (
            lambda text: text.replace(
                '"kv_link": null', '"kv_link": {"latency_ns": -1, "byte_ns": 1}'
            ),
            "latency_ns is -1",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, change: object, match: str) -> None:
    path = tmp_path / "cost.json"
    write_calibration(path, calibration_of())
    assert callable(change)
    path.write_text(change(path.read_text("utf-8")), "utf-8")
    with pytest.raises(ConfigError, match=match) as caught:
        read_calibration(path)
    assert str(path) in str(caught.value)


def test_what_cannot_be_read_or_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read"):
        read_calibration(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_calibration(tmp_path, calibration_of())
