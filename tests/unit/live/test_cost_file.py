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
