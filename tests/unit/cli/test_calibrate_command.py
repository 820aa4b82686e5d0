"""A log becomes a file, and the file a simulation that says where its numbers come from."""

import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.cli import calibrate as command
from headrace.cli.app import run
from headrace.core.base.errors import ConfigError, HeadraceError
from headrace.live.cost_file import read_calibration, write_calibration
from support.calibrations import calibration_of, write_log


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_from_a_log_to_a_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, file = tmp_path / "events.log", tmp_path / "cost.json"
    write_log(log)
    assert run(["calibrate", "--from", str(log), "--out", str(file)]) == 0
    shown = capsys.readouterr()
    assert "steps held out of a first fit" in shown.out
    assert "each row of logits" in shown.out
    assert f"written to {file}" in shown.err
    assert "warning" not in shown.err
    found = read_calibration(file)
    assert not found.host.has_client
    assert found.host.request.at(100) == pytest.approx(5_000_000, rel=1e-3)
    asked = ["sim", "--cost", str(file), "--mixed", "1", "--requests", "6", "--load", "0.2"]
    small = figures(capsys, *asked, "--prompt", "200", "--output", "8", "--workload", "rag")
    assert small["num_requests"] == 6
    assert small["provenance"]["kind"] == "calibrated"
    assert "way from clients" in " ".join(small["provenance"]["sources"])
    assert not small["provenance"]["extrapolates"]
    large = figures(capsys, *asked, "--prompt", "3000", "--output", "8", "--workload", "rag")
    assert any("kv tokens: seen up to" in one for one in large["provenance"]["extrapolates"])


def test_workers_of_one_machine_slow_each_other_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cost.json"
    write_calibration(file, calibration_of(slow_down=(1.0, 3.0)))
    asked = ["sim", "--cost", str(file), "--requests", "12", "--workload", "rag"]
    asked += ["--prompt", "400", "--output", "8", "--load", "6"]
    together = figures(capsys, *asked, "--mixed", "2")
    apart = figures(capsys, *asked, "--mixed", "2", "--sharing", "1")
    assert together["tpot_ms"]["mean"] > 1.5 * apart["tpot_ms"]["mean"]
    crowd = figures(capsys, *asked, "--mixed", "3", "--sharing", "3")
    assert any("3 workers on one machine" in one for one in crowd["provenance"]["extrapolates"])


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["calibrate", "--from", "/nowhere"], "/nowhere: cannot be read"),
        (["calibrate", "--from", "a", "--serve=--workers 3"], "recorded logs say what ran"),
        (["calibrate", "--passes", "0"], "--passes is 0"),
        (["calibrate", "--serve=--workers 'x"], "--serve is .*: no closing quotation"),
        (["calibrate", "--out", "/"], "/: cannot be written: is a directory"),
        (["calibrate", "--from", "a", "--from", "./a"], "--from names a log twice"),
        (["calibrate", "--from", "a", "--out", "/no/such/file"], "there is no folder /no/such"),
        (["sim", "--cost", "/nowhere"], "/nowhere: cannot be read"),
        (["sim", "--cost", "a", "--steps", "b"], "--steps and --cost"),
        (["sim", "--sharing", "0"], "--sharing is 0"),
    ],
)
def test_refusals(words: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        run(words)


def test_steps_that_vary_by_what_else_ran_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "events.log"
    write_log(log)
    found = calibration_of()
    busy = msgspec.structs.replace(
        found, held_out=msgspec.structs.replace(found.held_out, mean=0.41)
    )
    monkeypatch.setattr(command, "calibration_of", lambda *_, **__: busy)
    assert run(["calibrate", "--from", str(log)]) == 0
    assert "off by 41% on average" in capsys.readouterr().err
    file = tmp_path / "cost.json"
    for calibrated, is_told in ((busy, True), (found, False)):
        write_calibration(file, calibrated)
        asked = ["sim", "--cost", str(file), "--mixed", "1", "--requests", "3", "--workload", "rag"]
        sources = " ".join(figures(capsys, *asked)["provenance"]["sources"])
        assert ("the machine was busy with something else" in sources) == is_told


def test_a_log_that_is_too_short_is_said(tmp_path: Path) -> None:
    write_log(tmp_path / "log", num_seqs=1)
    with pytest.raises(HeadraceError, match="a fit needs 50"):
        run(["calibrate", "--from", str(tmp_path / "log")])


def test_who_waits_is_told_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of four seconds, after a server that took as long to start."""
    clock = count(0.0, 4.0)
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with command.showing_rounds() as on_round:
        for done in range(9):
            on_round(done, 8)
    assert capsys.readouterr().err.splitlines() == [
        "8 rounds of requests: half a minute for each worker and pass",
        "3 of 8 rounds have ended",
        "6 of 8 rounds have ended",
    ]
