"""/metrics against what clients saw."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.telemetry import Cause
from headrace.server.listener import bind
from headrace.server.metrics import ALIASES
from support.fake_engine import MODEL_NAME, formula_model
from support.http_server import RunningServer, running_server
from support.raw_http import eventually, is_idle, request_bytes, rest_of

Figures = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with formula_model() as booted, running_server(booted) as running:
        yield running


def scrape(server: RunningServer) -> Figures:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(figures: Figures, name: str) -> float:
    return sum(value for (own, _), value in figures.items() if own == name)


def load(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        create: Any = client.completions.create
        create(model=MODEL_NAME, prompt=["ab", "cd"], n=2, max_tokens=5)
        list(create(model=MODEL_NAME, prompt="x" * 40, max_tokens=7, stream=True))
        create(model=MODEL_NAME, prompt="x" * 40, max_tokens=1)
        with pytest.raises(openai.BadRequestError):
            create(model=MODEL_NAME, prompt="x", temperature=9)
    settle(server)


def settle(server: RunningServer) -> None:
    """Until the engine knows that all answers have left."""
    eventually(lambda: is_idle(server))
    server.booted.engine.check()


def test_the_figures_are_what_clients_saw(server: RunningServer) -> None:
    load(server)
    figures = scrape(server)
    assert total(figures, "headrace_accepted_seqs_total") == 6
    assert figures["headrace_finished_seqs_total", (("finished_reason", "length"),)] == 6
    assert total(figures, "headrace_output_tokens_total") == 4 * 5 + 7 + 1
    assert total(figures, "headrace_prompt_tokens_total") == 4 * 2 + 40 + 40
    assert total(figures, "headrace_prefix_hit_tokens_total") >= 32
    assert total(figures, "headrace_ttft_seconds_count") == 6
    assert total(figures, "headrace_e2e_seconds_count") == 6
    assert total(figures, "headrace_itl_seconds_count") == 4 * 4 + 6
    assert total(figures, "headrace_tpot_seconds_count") == 5
    parts = [total(figures, f"headrace_{p}_seconds_sum") for p in ("queue", "prefill", "decode")]
    assert sum(parts) <= total(figures, "headrace_e2e_seconds_sum") + 1e-6
    statuses = {
        dict(labels)["status"]: value
        for (name, labels), value in figures.items()
        if name == "headrace_http_requests_total"
    }
    assert statuses == {"200": 3, "400": 1}
    server.service.metrics.check()


def test_accepted_are_finished_running_or_waiting(server: RunningServer) -> None:
    load(server)
    gate = server.booted.executor.gate
    gate.clear()
    connection = HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        body = b'{"prompt": "abc", "n": 3, "max_tokens": 4}'
        connection.request("POST", "/v1/completions", body)
        figures = scrape(server)
        while total(figures, "headrace_accepted_seqs_total") < 9:  # counted soon after they run
            figures = scrape(server)
        living = total(figures, "headrace_running_seqs") + total(figures, "headrace_waiting_seqs")
        assert living == 3
        assert total(figures, "headrace_accepted_seqs_total") == 9
        assert total(figures, "headrace_finished_seqs_total") == 9 - living
        assert total(figures, "headrace_kv_usage_ratio") > 0
    finally:
        gate.set()
        connection.getresponse().read()
        connection.close()


def test_vllm_names_say_the_same(server: RunningServer) -> None:
    load(server)
    figures = scrape(server)
    names = {name for name, _ in figures}
    for own, alias in ALIASES.items():
        for suffix in ("", "_total", "_bucket", "_sum", "_count"):
            assert (own + suffix in names) == (alias + suffix in names)
            assert total(figures, own + suffix) == total(figures, alias + suffix)
    labels = [dict(labels) for name, labels in figures if name.startswith("vllm:")]
    assert labels
    assert all(one["model_name"] == MODEL_NAME for one in labels)


def test_labels_stay_few_whatever_is_asked(server: RunningServer) -> None:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=10)
    for i in range(50):
        connection.request("GET" if i % 2 else f"M{'X' * (i % 3)}", f"/nowhere/{i}")
        response = connection.getresponse()
        response.read()
        if response.headers.get("connection") == "close":
            connection.close()
    connection.close()
    counts = [key for key in scrape(server) if key[0] == "headrace_http_requests_total"]
    assert len(counts) <= 3


def test_a_miss_has_a_cause(server: RunningServer) -> None:
    server.booted.executor.step_s = 0.02
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        for headers in ({"x-slo-ttft-ms": "1"}, {"x-slo-ttft-ms": "10000", "x-slo-itl-ms": "1e4"}):
            client.completions.create(
                model=MODEL_NAME, prompt="ab", max_tokens=3, extra_headers=headers
            )
    settle(server)
    figures = scrape(server)
    assert total(figures, "headrace_goodput_requests_total") == 1
    assert total(figures, "headrace_slo_miss_total") >= 1
    causes = {
        dict(labels)["cause"] for (name, labels) in figures if name == "headrace_slo_miss_total"
    }
    assert causes <= {"own_prefill", "decode", "queue", "router_wait"}


LAX = {"x-slo-ttft-ms": "60000", "x-slo-itl-ms": "60000"}


def test_goodput_is_that_of_the_last_seconds(server: RunningServer) -> None:
    before = scrape(server)
    assert before["headrace_goodput_requests_per_second", (("window", "10s"),)] == 0
    assert total(before, "headrace_slo_attainment_ratio") == 0  # there is none
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        for headers in (LAX, LAX, LAX, LAX | {"x-slo-e2e-ms": "0.000001"}):
            client.completions.create(
                model=MODEL_NAME, prompt="ab", max_tokens=3, extra_headers=headers
            )
    settle(server)
    figures = scrape(server)
    for window in ("10s", "60s", "600s"):
        assert figures["headrace_slo_attainment_ratio", (("window", window),)] == 0.75
        # Three in the time since the start: a second at least, and less than this test may take.
        rate = figures["headrace_goodput_requests_per_second", (("window", window),)]
        assert 0.02 < rate <= 3


def test_time_is_spent_on_something(server: RunningServer) -> None:
    load(server)
    figures = scrape(server)
    spent = total(figures, "headrace_spent_seconds_total")
    assert spent == pytest.approx(total(figures, "headrace_e2e_seconds_sum"), rel=1e-9)
    assert spent > 0
    causes = [
        dict(labels)["cause"] for name, labels in figures if name.startswith("headrace_spent")
    ]
    assert causes == [cause.value for cause in Cause]
    assert client_wait_s(figures) == 0


def test_a_client_that_reads_slowly_is_what_an_answer_waited_for() -> None:
    listener = bind("127.0.0.1", 0)
    # What the kernel takes has left the server, so it takes little here.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    headers = LAX | {"x-slo-e2e-ms": "1"}
    body = {"model": MODEL_NAME, "prompt": "ab", "max_tokens": 800, "stream": True}
    with formula_model() as booted, running_server(booted, listener=listener) as server:
        begin = time.monotonic()
        with closing(socket.socket()) as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.settimeout(10)
            slow.connect(("127.0.0.1", server.port))
            data = json.dumps(body).encode()
            slow.sendall(
                request_bytes("/v1/completions", data, headers=headers | {"connection": "close"})
            )
            eventually(lambda: booted.engine.stats().num_running == 1)
            eventually(lambda: booted.engine.stats().num_running == 0)
            made_s = time.monotonic() - begin
            assert total(scrape(server), "headrace_e2e_seconds_count") == 0  # it is under way
            time.sleep(made_s + 0.2)
            assert b"[DONE]" in rest_of(slow)
        settle(server)
        figures = scrape(server)
    assert client_wait_s(figures) >= made_s + 0.1
    assert total(figures, "headrace_e2e_seconds_sum") >= 2 * made_s + 0.1
    misses = [dict(labels) for name, labels in figures if name == "headrace_slo_miss_total"]
    assert misses == [{"metric": "e2e", "cause": "client_backpressure"}]
    assert total(figures, "headrace_goodput_requests_total") == 0


def client_wait_s(figures: Figures) -> float:
    return figures["headrace_spent_seconds_total", (("cause", "client_backpressure"),)]
