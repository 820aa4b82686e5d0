"""A server's recording, simulated: what was found in the cache is found there again."""

from pathlib import Path

import httpx

from headrace.core.base.request import Slo
from headrace.core.config.telemetry import TelemetryConfig
from headrace.core.workload.recording import read_recording
from headrace.live.traffic import TrafficRecorder
from headrace.sim.whatif import Trial, run_trial
from support.fake_engine import formula_model
from support.http_server import running_server

TALKS = (
    ["how does a mill work", "and where does the water come from", "who built the first one"],
    ["how does a mill work, in two words", "thanks"],
    ["how does a mill work", "no, a wind mill"],
)


def test_a_simulation_of_a_recording_finds_what_was_cached(tmp_path: Path) -> None:
    """Conversations, each with its answers in the next prompt, one after another."""
    path = tmp_path / "traffic.jsonl"
    recorder = TrafficRecorder.of(TelemetryConfig(record=str(path)))
    with formula_model() as booted, running_server(booted, recorder=recorder) as server:
        for talk in TALKS:
            messages = [{"role": "system", "content": "be brief"}]
            for words in talk:
                messages.append({"role": "user", "content": words})
                body = {"messages": messages, "max_tokens": 40, "temperature": 0}
                answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=20)
                messages.append(answer.json()["choices"][0]["message"])
    assert recorder is not None
    recorder.close()
    with path.open("rb") as lines:
        recording = read_recording(lines)
    # Far apart, as a busy server's times may let an answer end after the next prompt came.
    found = run_trial(recording, Trial(slo=Slo(), speed=0.01))
    recorded = [one.cached_tokens for one in recording.requests]
    assert recorded[0] == 0
    assert all(number > 0 for number in recorded[1:])
    # Whole blocks have names; what prompts share of a block beyond is not in a recording.
    lacks = [was - is_found for was, is_found in zip(recorded, found.cached_tokens, strict=True)]
    assert min(lacks) >= 0
    assert max(lacks) < recording.begin.block_tokens
    assert lacks.count(0) >= 3
    assert list(found.output_tokens) == [one.output_tokens for one in recording.requests]
