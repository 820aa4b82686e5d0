"""Two workers are calibrated on this machine, and the simulator takes what was found."""

import json
from pathlib import Path

import pytest

from headrace.cli.app import run
from headrace.core.cost.formula import KNOTS
from headrace.live.cost_file import read_calibration


@pytest.mark.slow
def test_two_workers_are_calibrated_and_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "two.json"
    words = ["--serve=--workers 2 --kv-memory 256MiB", "--out", str(file)]
    assert run(["calibrate", *words]) == 0
    capsys.readouterr()
    found = read_calibration(file)
    assert found.num_workers == found.seen.num_workers == len(found.slow_down) == 2
    assert found.slow_down[0] == 1.0
    assert found.host.has_client
    assert found.host.request.fixed_ns > 0.0
    assert found.host.first_token_ns > 0.0
    assert found.steps.knot_ns[KNOTS.index(512)] > 3 * found.steps.knot_ns[0]
    assert found.seen.largest.num_tokens > 256
    assert run(["sim", "--cost", str(file), "--mixed", "2", "--requests", "4", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["provenance"]["kind"] == "calibrated"
    assert figures["num_requests"] == 4
