"""`headrace sim run` and `sim whatif`: what they say of a log, and what they refuse."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace as replace_spec

from headrace.adapters.executors.sim import FakeSteps
from headrace.cli import sim_progress
from headrace.cli.app import run as run_line
from headrace.cli.sim_log import load_recording
from headrace.core.base.errors import ConfigError
from headrace.core.base.events import Arrive, Emit
from headrace.core.config.schema import SchedulerConfig
from headrace.core.cost.calibration import Host, Line
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.engine.trace import Frame
from headrace.live.cost_file import write_calibration
from headrace.live.event_log import EventLogReader, EventLogWriter
from headrace.live.step_fit import NAME as STEP_FIT
from support.calibrations import SPEC, calibration_of, write_log
from support.fake_device import LinearCost
from support.live import Ear, ManualExecutor, live_engine, seq_spec, worker_spec
from support.recordings import COST, line, lines_of, pool


@pytest.fixture
def log(tmp_path: Path) -> Path:
    rng = Random(3)
    stem = [rng.randrange(900) for _ in range(64)]
    lines = [
        line(i, i * 0.05, [*stem, *(rng.randrange(900) for _ in range(150))], [7] * 6)
        for i in range(30)
    ]
    path = tmp_path / "traffic.jsonl"
    path.write_bytes(b"".join(lines_of(lines, pool(1), is_alone=True)))
    return path


@pytest.fixture
def events(tmp_path: Path) -> Path:
    path = tmp_path / "events.log"
    steps = FakeSteps(LinearCost(), 50)
    executor = ManualExecutor(worker_spec(), steps, is_free=True)
    with live_engine(executor, event_log=path, overlap="auto") as engine:
        ear = Ear()
        for number in range(12):
            engine.submit([seq_spec(number, (1, 2, number) * 9, max_tokens=9)], ear)
        ear.hear_ends(12)
    return path


def answer(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Any:
    assert run_line(["sim", *map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "labels"),
    [
        (["run", "LOG"], [""]),
        (["run", "EVENTS"], [""]),
        (["whatif", "LOG"], ["as recorded: ", "as asked: "]),
        (["whatif", "LOG", "--seeds", "2"], ["as recorded, seed 0: ", "as asked, seed 1: "]),
    ],
)
def test_who_waits_is_told_how_far_it_is(
    words: list[str],
    labels: list[str],
    log: Path,
    events: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sim_progress, "NOTE_EVERY_S", 0.0)
    monkeypatch.setattr(sim_progress, "SEEN_PER_LOOK", 1)
    files = {"LOG": str(log), "EVENTS": str(events)}
    assert run_line(["sim", *(files.get(word, word) for word in words)]) == 0
    told = capsys.readouterr().err.splitlines()
    of = "events" if "EVENTS" in words else "requests"
    for label in labels:
        assert any(line.startswith(f"{label}1 of ") and f" {of}, " in line for line in told), told
    assert " 0 s simulated" in told[0]


# ---- recordings


def test_a_recording_beside_its_simulation(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "run", log)
    assert found["num_requests"] == 30
    ttft = found["figures"]["ttft_ms_mean"]
    assert ttft["before"] == pytest.approx(1.0)
    # A step of 214 or 150 tokens, 0.1 ms for each.
    assert 15.0 < ttft["after"] < 25.0
    assert ttft["low"] <= ttft["difference"] <= ttft["high"]
    assert found["figures"]["hit_rate"]["after"] == pytest.approx(29 * 64 / (30 * 214))
    assert answer(capsys, "run", log) == found
    assert run_line(["sim", "run", str(log)]) == 0
    out = capsys.readouterr().out
    assert "TTFT p99, ms" in out
    assert "recorded" in out


def test_what_another_configuration_would_have_done(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--workers", 2, "--policy", "round_robin", "--speed", 4, "--price", 3)
    found = answer(capsys, "whatif", log, *asked, "--slo-ttft-ms", 30, "--seeds", 2)
    assert found["asked"]["workers"] == 2
    assert found["asked"]["policy"] == "round_robin"
    figures = found["figures"]
    assert figures["attainment"]["difference"] > 0
    assert figures["ttft_ms_p99"]["difference"] < 0
    assert figures["cost_usd"]["difference"] > 0
    assert found["recorded"]["ttft_ms_mean"] == pytest.approx(1.0)
    late = [miss for miss in found["misses"] if miss["metric"] == "ttft"]
    assert any(miss["after"] < miss["before"] for miss in late)
    assert "bootstrap" in found["intervals"]
    words = ["sim", "whatif", str(log), *map(str, asked), "--slo-ttft-ms", "30"]
    assert run_line(words) == 0
    shown = capsys.readouterr()
    assert "cost, $" in shown.out
    assert "why limits were missed" in shown.out
    assert "bootstrap" in shown.err


def test_nothing_else_asked_is_no_difference(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = answer(capsys, "whatif", log)["figures"]
    for name, figure in figures.items():
        assert figure["difference"] in (0.0, None), name


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (("--workers", "-1"), "--workers"),
        (("--policy", "luck"), "round_robin"),
        (("--kv-blocks", "0"), "--kv-blocks"),
        (("--speed", "0"), "--speed"),
        (("--seeds", "0"), "--seeds"),
        (("--slo-ttft-ms", "-5"), "--slo-ttft-ms"),
        (("--prefill", "2"), "decode"),
        (("--order", "luck"), "fcfs"),
        (("--kv-disk-gb-s", "2"), "--kv-disk-gb-s is the speed of a tier that is not there"),
    ],
)
def test_what_cannot_be_is_refused(log: Path, flags: tuple[str, ...], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        run_line(["sim", "whatif", str(log), *flags])


def test_what_was_put_aside_of_the_same_recording_is_read_too(log: Path) -> None:
    head, lines = (
        log.read_bytes().splitlines(keepends=True)[:2],
        log.read_bytes().splitlines(keepends=True),
    )
    older = log.with_name(log.name + ".1")
    older.write_bytes(b"".join(lines[:20]))
    log.write_bytes(b"".join([*head, *lines[20:]]))
    assert len(load_recording(str(log)).requests) == 30
    older.write_bytes(older.read_bytes().replace(b'"recording_id":"r"', b'"recording_id":"q"'))
    assert len(load_recording(str(log)).requests) == 12


# ---- whose step times


def test_a_calibrated_machine_serves_recorded_traffic(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its steps, its way from the server to the engine, and its cores, which two workers share."""
    slow = FittedCostModel(
        name="slow",
        knot_ns=tuple(2.0 * ns for ns in COST.knot_ns),
        seq_ns=0.0,
        logit_row_ns=0.0,
        attention_pair_ns=0.0,
        kv_token_ns=0.0,
    )
    host = Host(request=Line(9e9), server=Line(3e6), first_token_ns=9e9, has_client=True)
    file = tmp_path / "cost.json"
    write_calibration(
        file, calibration_of(steps=slow, believed=slow, host=host, slow_down=(1.0, 2.0))
    )
    before = answer(capsys, "run", log)["figures"]["ttft_ms_mean"]["after"]
    found = answer(capsys, "run", log, "--cost", file)
    assert found["figures"]["ttft_ms_mean"]["after"] == pytest.approx(2 * before + 3.0, rel=0.05)
    assert found["provenance"]["kind"] == "calibrated"
    assert any("2 workers share" in one for one in found["provenance"]["sources"])

    asked = ("whatif", log, "--cost", file, "--workers", 2, "--policy", "round_robin")
    shared = answer(capsys, *asked, "--speed", 4)["figures"]["ttft_ms_mean"]["after"]
    apart = answer(capsys, *asked, "--speed", 4, "--sharing", 1)["figures"]["ttft_ms_mean"]["after"]
    assert shared > 1.2 * apart
    crowd = answer(capsys, *asked, "--sharing", 3)["provenance"]["extrapolates"]
    assert crowd[0] == "3 workers on one machine: seen up to 2 in a step at once"


def test_an_event_log_tells_what_its_own_steps_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "events.log"
    write_log(path, come_ns=30_000_000)
    found = answer(capsys, "whatif", path, "--step-tokens", 4096, "--budget", "fixed")
    figures = found["figures"]
    for name in ("ttft_ms_mean", "ttft_ms_p99", "tpot_ms_mean", "e2e_ms_mean"):
        assert figures[name]["before"] == pytest.approx(found["recorded"][name], rel=0.03), name
    assert found["provenance"]["kind"] == "calibrated"
    assert "steps of its own" in found["provenance"]["sources"][0]
    # The log's steps have at most 512 tokens.
    assert any("tokens: seen up to" in one for one in found["provenance"]["extrapolates"])
    assert not answer(capsys, "whatif", path)["provenance"]["extrapolates"]


def test_a_recording_says_whose_steps_it_takes(
    log: Path, events: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, "run", log)["provenance"]
    assert found["kind"] == "recorded"
    assert found["sources"] == [
        "1 mixed worker with a machine like the recorded one's: 100 steps that were not recorded"
        " (a line); it had too few since"
    ]
    fitted = msgspec.structs.replace(COST, name=STEP_FIT)
    seen = msgspec.structs.replace(pool(1), cost=fitted)
    log.write_bytes(b"".join(lines_of(load_recording(str(log)).requests, seen, is_alone=True)))
    assert answer(capsys, "run", log)["provenance"]["sources"] == [
        "1 mixed worker with a machine like the recorded one's: 100 recorded steps, as their"
        " driver saw them"
    ]
    file = tmp_path / "cost.json"
    other = replace_spec(SPEC, model_digest="11" * 32)
    write_calibration(file, calibration_of(spec=other))
    beyond = answer(capsys, "run", log, "--cost", file)["provenance"]["extrapolates"]
    assert "another model was calibrated than was recorded" in beyond
    with pytest.raises(ConfigError, match="decided again"):
        run_line(["sim", "run", str(events), "--cost", str(file)])
    with pytest.raises(ConfigError, match="by the engine that it is of"):
        run_line(["sim", "run", str(events), "--like", str(log)])
    with pytest.raises(ConfigError, match="--cost FILE"):
        run_line(["sim", "whatif", str(log), "--sharing", "2"])


def test_few_recorded_steps_say_little(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.write_bytes(log.read_bytes().replace(b'"num_samples":100', b'"num_samples":12'))
    beyond = answer(capsys, "run", log)["provenance"]["extrapolates"]
    assert beyond[0].startswith("12 steps of mixed workers: of fewer than 50 a fit says little")


def test_a_cut_recording_says_so(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.write_bytes(log.read_bytes()[:-9])
    found = answer(capsys, "run", log)
    assert found["num_requests"] == 29
    assert found["notes"] == ["the recording's last line is cut, and left out"]


def test_workers_of_another_recording_stand_for_engines_of_others(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, _, *lines = log.read_bytes().splitlines(keepends=True)
    gateway = tmp_path / "gateway.jsonl"
    gateway.write_bytes(b"".join([head, *lines]))
    with pytest.raises(ConfigError, match="--like"):
        run_line(["sim", "run", str(gateway)])
    with_workers = answer(capsys, "run", gateway, "--like", log)
    assert with_workers["figures"] == answer(capsys, "run", log)["figures"]
    asked = answer(capsys, "whatif", gateway, "--like", log, "--workers", 2)
    assert asked["asked"]["workers"] == 2
    for found in (with_workers, asked):
        first = found["provenance"]["sources"][0]
        assert first == f"requests of {gateway} on the workers of {log}, their number too"


@pytest.mark.parametrize("data", [b"", b"{}", b"\x00\x01", b"GGUF" * 9])
def test_a_file_that_is_no_log_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "no.log"
    path.write_bytes(data)
    for words in (["run"], ["whatif"]):
        with pytest.raises(ConfigError):
            run_line(["sim", *words, str(path)])


# ---- event logs


def test_an_event_log_is_decided_again(events: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "run", events)
    assert found["is_equal"]
    assert found["num_steps"] >= 9
    with EventLogReader(events) as reader:
        assert found["num_events"] == len(list(reader))
    assert run_line(["sim", "run", str(events)]) == 0
    assert "decided as recorded" in capsys.readouterr().out


def test_another_decision_is_found(
    events: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once by another configuration, once where the log lacks an effect."""
    with EventLogReader(events) as reader:
        header, frames = reader.header, list(reader)
    other = replace(header.config, scheduler=SchedulerConfig(max_running_seqs=1))
    changed = tmp_path / "changed.log"
    writer = EventLogWriter(changed, msgspec.structs.replace(header, config=other))
    for frame in frames:
        writer.write(frame.now, frame.event, frame.effects)
    writer.close()
    found = answer(capsys, "run", changed, code=1)
    assert not found["is_equal"]
    assert found["recorded"] != found["simulated"]

    place = next(i for i, one in enumerate(frames) if any(isinstance(e, Emit) for e in one.effects))
    one = frames[place]
    kept = tuple(effect for effect in one.effects if not isinstance(effect, Emit))
    frames[place] = Frame(one.now, one.event, kept)
    writer = EventLogWriter(changed, header)
    for frame in frames:
        writer.write(frame.now, frame.event, frame.effects)
    writer.close()
    assert run_line(["sim", "run", str(changed)]) == 1
    assert f"event {place} is not as recorded" in capsys.readouterr().err


def test_an_event_log_is_a_recording_too(events: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = load_recording(str(events))
    with EventLogReader(events) as reader:
        emitted = sum(
            len(e.tokens) for frame in reader for e in frame.effects if isinstance(e, Emit)
        )
    assert len(found.requests) == 12
    assert sum(one.output_tokens for one in found.requests) == emitted
    assert answer(capsys, "whatif", events, "--workers", 2)["num_requests"] == 12


@pytest.mark.parametrize("words", ["run", "whatif"])
def test_a_recording_without_workers_is_refused(log: Path, words: str) -> None:
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(one for one in lines if b'"kind":"pools"' not in one))
    with pytest.raises(ConfigError, match="does not say what its workers are"):
        run_line(["sim", words, str(log)])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"prompt_tokens": (1, -1)}, "a token that cannot be"),
        ({"prompt_tokens": (1, 1 << 62)}, "a token that cannot be"),
        ({"prompt_tokens": ()}, "prompt_tokens is 0"),
    ],
)
def test_an_event_log_of_what_cannot_be_is_refused(
    events: Path, tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    with EventLogReader(events) as reader:
        header, frames = reader.header, list(reader)
    path = tmp_path / "damaged.log"
    writer = EventLogWriter(path, header)
    for frame in frames:
        event = frame.event
        if isinstance(event, Arrive):
            event = Arrive(tuple(replace_spec(seq, **changed) for seq in event.seqs))
        writer.write(frame.now, event, frame.effects)
    writer.close()
    with pytest.raises(ConfigError, match=f"event log is damaged: .*{words}"):
        run_line(["sim", "whatif", str(path)])
