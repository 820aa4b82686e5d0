"""`headrace top` shows what /metrics says, and no more."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from headrace.cli.main import main
from headrace.cli.top import Reading, facts, figures
from headrace.core.base.sampling import SamplingParams
from headrace.live.generate import GenerateRequest
from support.fake_engine import formula_model
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


def test_a_gateway_has_nothing_to_show(capsys: Capture) -> None:
    """Its page has none of these figures, and zeros would look like a server that is idle."""
    with other_server(b'headrace_engine_up{engine="e0"} 1\n') as url:
        assert main(["top", url, "--once"]) == 2
    assert "is of a gateway" in capsys.readouterr().err


def test_bad_words(capsys: Capture) -> None:
    for url in ("file:///etc/passwd", "http://[::1", "http://127.0.0.1:abc", "http://h:0"):
        assert main(["top", url]) == 2
        assert "is no http address" in capsys.readouterr().err
    assert main(["top", "http://127.0.0.1:9", "--once"]) == 2
    assert "cannot be read: " in capsys.readouterr().err
    assert main(["top", "http://127.0.0.1:9", "--every", "0"]) == 2
    assert "0.1 to 3600 seconds" in capsys.readouterr().err
