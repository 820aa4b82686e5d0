"""A gateway records what it relays, and no word of it."""

from pathlib import Path

import httpx

from headrace.core.workload.recording import NAME_BYTES, Recording, read_recording
from support import stub_engine as stub
from support.fake_engine import formula_model
from support.gateway import running_gateway
from support.http_server import running_server
from support.stub_engine import stub_engine

PROMPT = "the quick zebra asks for water " * 20


def read(path: Path) -> Recording:
    with path.open("rb") as lines:
        return read_recording(lines)


def test_requests_through_a_gateway(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    with (
        formula_model() as booted,
        running_server(booted) as server,
        running_gateway(server.url, record=str(path), slo_ttft_ms=70) as gateway,
    ):
        for words, is_stream in (("one", True), ("two", False)):
            body = {"prompt": PROMPT + words, "max_tokens": 12, "stream": is_stream}
            answer = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=20)
            assert answer.status_code == 200
        refused = httpx.post(f"{gateway.url}/v1/completions", json={"max_tokens": "x"}, timeout=20)
        assert refused.status_code == 400
    found = read(path)
    stream, whole, bad = found.requests
    assert (stream.end, whole.end, bad.end) == ("stop", "stop", "rejected")
    assert bad.code == "400"
    assert stream.output_tokens == 12
    assert stream.ttft_ns is not None
    assert stream.e2e_ns is not None
    assert 0 < stream.ttft_ns <= stream.e2e_ns
    # 600 bytes: two whole pieces of 256 are the same.
    assert len(stream.blocks) == 2 * NAME_BYTES
    assert stream.blocks == whole.blocks
    assert found.begin.slo.ttft_ms == 70
    assert found.begin.block_tokens == 64
    assert b"zebra" not in path.read_bytes()


def test_an_answer_that_breaks_off(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    with (
        stub_engine(stub.sends(stub.STREAM_HEAD, stub.chunk(stub.event("a")))) as engine,
        running_gateway(engine.url, record=str(path)) as gateway,
    ):
        body = {"prompt": PROMPT, "max_tokens": 12, "stream": True}
        httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=20)
    (broken,) = read(path).requests
    assert broken.end == "error"
    assert broken.ttft_ns is not None
