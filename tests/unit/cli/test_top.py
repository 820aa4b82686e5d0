"""`headrace top` shows what /metrics says, and no more."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from headrace.cli import top_gateway
from headrace.cli.main import main
from headrace.cli.top import facts, figures
from headrace.cli.top_reading import Reading
from headrace.core.base.sampling import SamplingParams
from headrace.live.generate import GenerateRequest
from support.fake_engine import formula_model
from support.gateway import running_gateway
from support.http_server import running_server

Capture = pytest.CaptureFixture[str]


def reading(at_s: float, **values: float) -> Reading:
    return Reading(at_s, {(f"headrace_{name}", ()): value for name, value in values.items()})


def test_rates_and_means_are_of_the_time_between_two_looks() -> None:
    before = reading(
        10, output_tokens_total=100, ttft_seconds_sum=1.0, ttft_seconds_count=2, steps_total=7
    )
    now = reading(
        12,
        output_tokens_total=150,
        ttft_seconds_sum=1.6,
        ttft_seconds_count=5,
        steps_total=7,
        prefix_queried_tokens_total=40,
        prefix_hit_tokens_total=10,
        running_seqs=3,
    )
    shown = figures(now, before)
    assert shown["output_tokens_per_s"] == 25
    assert shown["ttft_ms_mean"] == pytest.approx(200)
    assert shown["steps_per_s"] == 0
    assert shown["prefix_hit_ratio"] == 0.25
    assert shown["itl_ms_mean"] is None
    assert shown["num_running_seqs"] == 3
    assert facts(shown)["latency"] == {"TTFT": "200 ms", "ITL": "- ms", "E2E": "- ms"}
    assert figures(now, None)["output_tokens_per_s"] is None


def test_a_running_server(capsys: Capture) -> None:
    with formula_model() as booted, running_server(booted) as server:
        request = GenerateRequest(
            request_id="r", prompt_tokens=[5] * 40, params=SamplingParams(max_tokens=9)
        )
        list(booted.text_engine.stream_sync(request))
        assert main(["top", f"{server.url}/v1", "--json", "--every", "0.1"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["num_running_seqs"] == 0
        assert shown["workers"] == []
        assert list(shown["by_window"]) == ["10s", "60s", "600s"]
        assert main(["top", server.url, "--once", "--every", "0.1"]) == 0
        out = capsys.readouterr().out
        assert "0 running, 0 waiting" in out
        assert "requests/s kept every limit" in out


@contextmanager
def other_server(body: bytes, *, is_http: bool = True) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if is_http:
                self.send_response(200)
                self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("body", [b"", b"up 1\n", b"<html>\n", b"\xff\xfe"])
def test_what_is_not_headrace_is_said_to_be(body: bytes, capsys: Capture) -> None:
    for is_http in (True, False):
        with other_server(body, is_http=is_http) as url:
            assert main(["top", url, "--once"]) == 2
        assert "/metrics" in capsys.readouterr().err


def test_a_gateway_shows_its_engines(capsys: Capture) -> None:
    dead = "http://127.0.0.1:9"
    with (
        formula_model() as booted,
        running_server(booted) as server,
        running_gateway(server.url, dead, waits_for=1) as gateway,
    ):
        model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        ask = {"model": model, "prompt": "abc", "max_tokens": 3}
        assert httpx.post(f"{gateway.url}/v1/completions", json=ask).status_code == 200
        assert main(["top", gateway.url, "--json", "--every", "0.1"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["engines"] == [
            {"name": "e0", "is_up": True, "num_requests": 0},
            {"name": "e1", "is_up": False, "num_requests": 0},
        ]
        assert main(["top", gateway.url, "--once", "--every", "0.1"]) == 0
        out = capsys.readouterr().out
    assert "up, 0 requests" in out
    assert "down, 0 requests" in out


def test_what_a_gateway_did_between_two_looks() -> None:
    def page(at_s: float, **values: float) -> Reading:
        samples = dict(reading(at_s, **values).samples)
        engines = {"headrace_engine_up": 1.0, "headrace_engine_requests_in_flight": 2.0}
        for name, value in engines.items():
            samples |= {(name, (("engine", engine),)): value for engine in ("e0", "e1")}
        return Reading(at_s, samples)

    before = page(10, router_dispatched_requests_total=4)
    now = page(
        12,
        router_dispatched_requests_total=10,
        first_byte_seconds_sum=0.3,
        first_byte_seconds_count=6,
        router_queried_blocks_total=40,
        router_hit_blocks_total=10,
        router_open_breakers=1,
    )
    shown = top_gateway.figures(now, before)
    assert shown["requests_per_s"] == 3
    assert shown["first_byte_ms_mean"] == pytest.approx(50)
    assert shown["prefix_hit_ratio"] == 0.25
    assert shown["num_requests"] == 4
    told = top_gateway.facts(shown)
    assert told["engines"] == {
        "e0": "up, 2 requests",
        "e1": "up, 2 requests",
        "cut off after failures": "1",
    }
    assert told["work"]["requests"] == "4 at engines, 0 waiting, 3/s sent on"


def test_bad_words(capsys: Capture) -> None:
    for url in ("file:///etc/passwd", "http://[::1", "http://127.0.0.1:abc", "http://h:0"):
        assert main(["top", url]) == 2
        assert "is no http address" in capsys.readouterr().err
    assert main(["top", "http://127.0.0.1:9", "--once"]) == 2
    assert "cannot be read: " in capsys.readouterr().err
    assert main(["top", "http://127.0.0.1:9", "--every", "0"]) == 2
    assert "0.1 to 3600 seconds" in capsys.readouterr().err
