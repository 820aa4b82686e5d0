"""The recorder of traffic, behind a server whose model is a formula."""

import json
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.core.base.errors import ConfigError
from headrace.core.base.events import StartStep, StepDone, StepFailed
from headrace.core.base.plan import SampleSpec, SeqStep, StepPlan, StepResult
from headrace.core.base.request import Slo
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import BlockId, Ns, SeqId, StepId
from headrace.core.config.telemetry import TelemetryConfig
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.cost.learned import MIN_SAMPLES
from headrace.core.cost.model import StepShape
from headrace.core.workload.recording import (
    NAME_BYTES,
    Begin,
    Pools,
    Recorded,
    Recording,
    read_recording,
)
from headrace.live import traffic
from headrace.live.step_fit import StepFit
from headrace.live.traffic import TrafficFile, TrafficRecorder
from support.fake_engine import formula_model
from support.http_server import running_server

PROMPT = "the quick zebra asks for water, and nobody in the whole town has any"


def read(path: Path) -> Recording:
    with path.open("rb") as lines:
        return read_recording(lines)


def serve(path: Path, *bodies: dict[str, Any]) -> list[str]:
    """The texts that come back."""
    recorder = TrafficRecorder.of(TelemetryConfig(record=str(path)))
    with formula_model() as booted, running_server(booted, recorder=recorder) as server:
        texts = []
        for body in bodies:
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=20).json()
            texts += [choice["text"] for choice in answer.get("choices", ())]
    assert recorder is not None
    recorder.close()
    return texts


def test_what_was_served_is_in_the_file_and_no_word_of_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "traffic.jsonl"
    (first, second, *choices) = serve(
        path,
        {"prompt": PROMPT, "max_tokens": 30},
        {"prompt": PROMPT + " left", "max_tokens": 12, "seed": 7, "user": "ann"},
        {"prompt": PROMPT, "max_tokens": 12, "n": 2, "seed": 7},  # no key of the file by chance
    )
    data = path.read_bytes()
    for word in (PROMPT, "zebra", first, second, *choices, "ann", "cmpl-"):
        assert word.encode() not in data
    ids = ",".join(map(str, PROMPT.encode()[:4]))
    assert ids.encode() not in data.replace(b" ", b"")
    found = read(path)
    one, two, three, four = found.requests
    assert (one.prompt_tokens, one.output_tokens, one.max_tokens) == (len(PROMPT), 30, 30)
    assert len(one.blocks) == (len(PROMPT) + 30) // 16 * NAME_BYTES
    num_shared = len(PROMPT) // 16 * NAME_BYTES
    assert two.blocks[:num_shared] == one.blocks[:num_shared]
    assert three.request == four.request == two.request + 1
    assert one.ttft_ns is not None
    assert one.e2e_ns is not None
    assert 0 < one.ttft_ns <= one.e2e_ns
    assert one.cached_tokens == 0 < two.cached_tokens
    assert found.begin.is_alone
    (pool,) = found.pools[-1].pools
    assert pool.cost.num_samples > 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_names_of_two_recordings_have_nothing_in_common(tmp_path: Path) -> None:
    for name in ("a", "b"):
        serve(tmp_path / name, {"prompt": PROMPT, "max_tokens": 1})
    one, other = read(tmp_path / "a"), read(tmp_path / "b")
    assert one.begin.recording_id != other.begin.recording_id
    assert one.requests[0].prompt_tokens == other.requests[0].prompt_tokens
    assert one.requests[0].blocks[:NAME_BYTES] != other.requests[0].blocks[:NAME_BYTES]


def test_a_recording_that_is_there_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "log"
    serve(path, {"prompt": PROMPT, "max_tokens": 1})
    before = path.read_bytes()
    serve(path, {"prompt": PROMPT, "max_tokens": 2})
    assert (tmp_path / "log.1").read_bytes() == before
    assert read(path).requests[0].output_tokens == 2


def test_the_newest_lines_are_kept_within_the_limit(tmp_path: Path) -> None:
    path, limit = tmp_path / "log", 8000
    file = TrafficFile(path, limit)
    file.write(Begin(block_tokens=16))
    file.write(Pools(at_ns=Ns(0), pools=()))
    for number in range(500):
        file.write(
            Recorded(
                request=number,
                arrived_ns=Ns(number),
                prompt_tokens=1,
                output_tokens=1,
                max_tokens=1,
                end="stop",
            )
        )
    file.close()
    old = tmp_path / "log.1"
    assert path.stat().st_size + old.stat().st_size <= limit
    lines = old.read_bytes().splitlines(keepends=True) + path.read_bytes().splitlines(keepends=True)
    numbers = [line.request for line in read_recording(lines).requests]
    assert numbers == list(range(numbers[0], 500))
    assert json.loads(path.read_bytes().splitlines()[1])["kind"] == "pools"


@pytest.mark.parametrize("place", ["folder", "/dev/null"])
def test_a_place_that_cannot_be_written_is_told_at_once(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="cannot record traffic: not a regular file"):
        TrafficRecorder.of(TelemetryConfig(record=str(tmp_path / place)))


def test_without_a_file_there_is_no_recorder() -> None:
    assert TrafficRecorder.of(TelemetryConfig()) is None


def test_what_it_cannot_keep_up_with_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "MAX_WAITING_TOKENS", -1)
    serve(tmp_path / "log", {"prompt": PROMPT, "max_tokens": 1})
    found = read(tmp_path / "log")
    assert (len(found.requests), found.num_lost) == (0, 1)


def test_a_full_disk_ends_the_recording_and_not_the_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def open_full(file: TrafficFile) -> None:
        file._file = Path("/dev/full").open("wb")  # noqa: SIM115 - the file closes it
        file._num_bytes = 0

    monkeypatch.setattr(TrafficFile, "_open", open_full)
    texts = serve(tmp_path / "log", *[{"prompt": PROMPT, "max_tokens": 1}] * 3)
    assert len(texts) == 3
    (record,) = [one for one in caplog.records if one.levelname == "ERROR"]
    assert record.exc_info is None
    assert record.message == (
        f"the recording of traffic has ended: cannot write {tmp_path / 'log'}: no space left on"
        " device; serving goes on without it; to have one again, make room or name another file"
        " and start again"
    )


def test_steps_take_what_their_driver_saw() -> None:
    """Twice what the device says, since the host takes as long again."""
    fit, now = StepFit(FittedCostModel.prior()), 0
    assert fit.cost() == FittedCostModel.prior()
    plan = StepPlan(
        StepId(0),
        (SeqStep(SeqId(0), 0, (1,) * 64, (BlockId(0),), SampleSpec(SamplingParams(), 64)),),
    )
    for number in range(2 * MIN_SAMPLES):
        step = StepPlan(StepId(number), plan.seqs)
        fit.observe(Ns(now), StepFailed(StepId(-1), ""), (StartStep(step),))
        now += 2_000_000
        fit.observe(Ns(now), StepDone(StepResult(step.step_id, (), Ns(1_000_000))), ())
    cost = fit.cost()
    assert cost.num_samples == 2 * MIN_SAMPLES
    assert cost.step_ns(StepShape.of(plan)) == pytest.approx(2_000_000, rel=0.02)


def test_steps_are_told_beside_what_those_before_them_predicted() -> None:
    """Four milliseconds each, of which one in the device; then twice eight at once."""
    fit, now = StepFit(FittedCostModel.prior()), 0
    seqs = (SeqStep(SeqId(0), 0, (1,) * 64, (BlockId(0),), SampleSpec(SamplingParams(), 64)),)
    for number in range(MIN_SAMPLES + 10):
        step = StepPlan(StepId(number), seqs)
        fit.observe(Ns(now), StepFailed(StepId(-1), ""), (StartStep(step),))
        now += 4_000_000 if number < MIN_SAMPLES + 8 else 8_000_000
        fit.observe(Ns(now), StepDone(StepResult(step.step_id, (), Ns(1_000_000))), ())
    times = fit.cost().times
    assert times.num_steps == 10
    assert times.took_ns == 8 * 4_000_000 + 2 * 8_000_000
    assert times.late_ns == 8 * 3_000_000 + 2 * 7_000_000
    assert times.predicted_ns == pytest.approx(10 * 4_000_000, rel=0.01)
    assert times.error_ns == pytest.approx(2 * 4_000_000, rel=0.05)


def test_the_mean_of_steps_of_which_some_are_held_up_is_kept() -> None:
    """One step in five takes ten times as long as the others."""
    fit, now = StepFit(FittedCostModel.prior()), 0
    seqs = (SeqStep(SeqId(0), 0, (1,) * 64, (BlockId(0),), SampleSpec(SamplingParams(), 64)),)
    for number in range(600):
        step = StepPlan(StepId(number), seqs)
        fit.observe(Ns(now), StepFailed(StepId(-1), ""), (StartStep(step),))
        now += 50_000_000 if number % 5 == 0 else 5_000_000
        fit.observe(Ns(now), StepDone(StepResult(step.step_id, (), Ns(1_000_000))), ())
    cost = fit.cost()
    assert cost.step_ns(StepShape.of(StepPlan(StepId(0), seqs))) == pytest.approx(14e6, rel=0.1)
    assert cost.largest == StepShape.of(StepPlan(StepId(0), seqs))


def test_the_limits_of_a_request_that_states_none() -> None:
    config = TelemetryConfig(slo_ttft_ms=0, slo_itl_ms=7.0)
    assert config.slo == Slo(ttft_ms=None, itl_ms=7.0)
