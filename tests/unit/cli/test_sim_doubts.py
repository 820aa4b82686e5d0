"""What `headrace sim run` and `sim whatif` say against a recording."""

import json
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from headrace.cli.app import run as run_line
from headrace.core.cost.fitted import StepTimes
from headrace.live.cost_file import write_calibration
from support.calibrations import calibration_of, write_log
from support.recordings import COST, line, lines_of, pool


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    assert run_line(["sim", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_starved_machine_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a second, 0.6 s of it outside the device, where a tenth of that was predicted."""
    held_up = StepTimes(
        num_steps=100,
        took_ns=1_000_000_000,
        predicted_ns=100_000_000,
        error_ns=900_000_000,
        late_ns=600_000_000,
    )
    log, rng = tmp_path / "traffic.jsonl", Random(3)
    stem = [rng.randrange(900) for _ in range(64)]
    requests = [
        line(i, i * 0.05, [*stem, *(rng.randrange(900) for _ in range(150))], [7] * 6)
        for i in range(30)
    ]
    starved = msgspec.structs.replace(pool(1), cost=msgspec.structs.replace(COST, times=held_up))
    log.write_bytes(b"".join(lines_of(requests, starved, is_alone=True)))
    for words in (["run", str(log)], ["whatif", str(log), "--workers", "2"]):
        doubts = answer(capsys, *words)["doubts"]
        [facts] = doubts["steps"]
        assert (facts["recorded_s"], facts["predicted_s"], facts["late_share"]) == (1.0, 0.1, 0.6)
        of_steps, of_simulation = doubts["warnings"]
        assert "the cost model does not explain them" in of_steps
        # 22.4 ms for the first one, and 16 for those that find its four blocks.
        assert "TTFT 16.21 ms where 1 ms were recorded" in of_simulation
        run_line(["sim", *words])
        err = capsys.readouterr().err
        assert f"warning: {of_steps}\nwarning: {of_simulation}\nrecorded: 100 steps of" in err
    other = log.with_name("other.json")
    write_calibration(other, calibration_of(steps=COST))
    doubts = answer(capsys, "run", log, "--cost", other)["doubts"]
    assert len(doubts["warnings"]) == 1  # that another machine is another one is no wonder


@pytest.mark.parametrize(("come_ms", "is_starved"), [(5, False), (3_000, True)])
def test_an_event_log_of_a_starved_server_is_told(
    come_ms: int, is_starved: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps take what was predicted; requests, so long until the engine heard of them."""
    path = tmp_path / "events.log"
    write_log(path, come_ns=come_ms * 1_000_000)
    doubts = answer(capsys, "whatif", path)["doubts"]
    [facts] = doubts["steps"]
    assert facts["recorded_s"] == pytest.approx(facts["predicted_s"], rel=1e-3)
    assert facts["error_share"] < 0.01
    assert doubts["router_wait_share"] == (1.0 if is_starved else 0.0)
    assert any("it was starved" in one for one in doubts["warnings"]) == is_starved
