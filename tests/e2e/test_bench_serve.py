"""`headrace bench serve` against the whole server, on a model that is a formula."""

import csv
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.core.config.schema import SchedulerConfig
from headrace.core.workload.traces import parse_trace
from support.fake_engine import formula_model
from support.http_server import RunningServer, running_server

TRACE = Path(__file__).parents[1] / "support" / "traces" / "mooncake_head.jsonl"
# A busy machine is late; and a byte is a token here, so lengths are not those of the workload.
CALM = ["--max-lag-ms", "60000", "--ttft-ms", "60000", "--tpot-ms", "60000", "--e2e-ms", "60000"]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with formula_model(num_blocks=8192, max_model_len=8192) as booted, running_server(booted) as s:
        yield s


class Bench:
    def __init__(self, server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
        self.url = server.url
        self.capsys = capsys

    def __call__(self, *flags: str, code: int = 0) -> Any:
        self.capsys.readouterr()
        line = ["bench", "serve", "--url", self.url, *CALM, *flags, "--json"]
        assert main(line) == code, self.capsys.readouterr().err
        return json.loads(self.capsys.readouterr().out)


@pytest.fixture
def bench(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(server, capsys)


def test_sessions_of_clients_and_what_is_written(bench: Bench, tmp_path: Path) -> None:
    files = {name: tmp_path / "new" / f"x.{name}" for name in ("out", "csv", "html")}
    flags = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    found = bench("--concurrency", "3", "--requests", "12", "--length-scale", "0.05", *flags)
    report = found["report"]
    assert (report["num_sent"], report["num_counted"]) == (12, 12)
    assert report["since_due"]["num_good"] == 12
    assert report["client"]["most_in_flight"] == 3
    # Three of the four requests of a session begin with what came before.
    assert report["cached_share"] > 0.3
    assert report["server"]["hit_rate"] == pytest.approx(report["cached_share"], abs=0.1)
    assert report["server"]["num_output_tokens"] == report["num_output_tokens"]
    assert json.loads(files["out"].read_text()) == found
    rows = list(csv.DictReader(files["csv"].read_text().splitlines()))
    assert len(rows) == 12
    assert sum(int(row["output_tokens"]) for row in rows) == report["num_output_tokens"]
    assert {row["is_good"] for row in rows} == {"1"}
    page = files["html"].read_text()
    assert page.count("<svg") == 5
    assert "12 sent, 12 counted" in page
    # Nothing is fetched.
    assert not any(word in page for word in ("src=", "href=", "@import", "url("))


def test_a_trace_shares_what_its_hash_ids_say(bench: Bench) -> None:
    scale = 0.01
    replay = ["--trace", str(TRACE), "--length-scale", str(scale), "--burst"]
    one, other = (bench(*replay, "--endpoint", "completions", "--seed", seed) for seed in "12")
    with TRACE.open() as lines:
        requests = parse_trace(lines)
    seen: set[int] = set()
    shared = 0
    for request in requests:
        known = [block in seen for block in request.blocks]
        shared += known.index(False) if False in known else len(known)
        seen.update(request.blocks)
    assert shared > 0
    expected = shared * 512 / sum(request.prompt_tokens for request in requests)
    for found in (one, other):
        report = found["report"]
        assert report["num_counted"] == report["since_due"]["num_good"] == len(requests)
        # Only whole KV blocks are shared, and requests that come together compute them twice.
        assert 0.3 * expected < report["server"]["hit_rate"] < 1.1 * expected
    # The same seed again is the same text again, which the server has kept.
    again = bench(*replay, "--endpoint", "completions", "--seed", "2")
    assert again["report"]["server"]["hit_rate"] > 0.9


def test_a_rate_and_the_search_for_one(bench: Bench) -> None:
    rag = ["--workload", "rag", "--length-scale", "0.01", "--requests", "10"]
    found = bench(*rag, "--rate", "200", "--burstiness", "0")
    assert found["report"]["load_per_s"] == pytest.approx(200.0)
    assert found["slo"]["ttft_ms"] == 60000
    assert found["traffic"].endswith("200 requests/s, even")
    found = bench(*rag, "--search", "rate", "--rate", "100", "--trials", "2")
    assert [trial["level"] for trial in found["search"]["trials"]] == [100.0, 200.0]
    assert found["search"]["held"] == 200.0
    assert found["report"]["num_counted"] == 10


def test_what_fails_is_told(bench: Bench) -> None:
    found = bench("--burst", "--requests", "4", "--max-length", "60000", "--turns", "1",
                  "--prompt", "9000", "--workload", "rag", code=1)  # fmt: skip
    assert found["report"]["num_failed_by_fault"] == {"status 400": 4}
    assert found["report"]["faults"] == ["no request was answered whole"]


def test_tables_and_notes(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["bench", "serve", "--url", f"{server.url}/v1/", *CALM, "--length-scale", "0.01"]
    assert main([*line, "--search", "concurrency", "--trials", "1", "--requests", "8"]) == 0
    printed = capsys.readouterr()
    assert "8 client(s) held with at least 90% good, more was not tried" in printed.out
    assert "TTFT since sent" in printed.out
    assert "warning: 8 answers are few" in printed.err


def test_ctrl_c_ends_a_run_with_its_report(bench: Bench, tmp_path: Path) -> None:
    lines = tmp_path / "requests.csv"
    threading.Timer(2.0, signal.raise_signal, [signal.SIGINT]).start()
    flags = ["--rate", "20", "--length-scale", "0.01", "--turns", "1", "--csv", str(lines)]
    found = bench(*flags, "--duration-s", "60", code=130)
    num_counted = found["report"]["num_counted"]
    assert 0 < num_counted < 1000
    assert "ended early by Ctrl-C" in found["report"]["warnings"][0]
    assert len(lines.read_text().splitlines()) == 1 + num_counted


@pytest.mark.slow
def test_the_search_finds_how_many_clients_an_engine_has_room_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two run and three wait; a sixth is refused, again and again, as it asks at once. However slow
    the machine is, five are the most.
    """
    line = ["bench", "serve", *CALM, "--workload", "rag", "--prompt", "20", "--output", "10"]
    line += ["--requests", "40", "--search", "concurrency", "--concurrency", "4", "--json"]
    scheduler = SchedulerConfig(max_running_seqs=2, max_waiting_seqs=3)
    with formula_model(num_blocks=2048, scheduler=scheduler) as booted:
        booted.executor.step_s = 0.005
        with running_server(booted) as server:
            assert main([*line, "--url", server.url]) == 0
    found = json.loads(capsys.readouterr().out)
    search = found["search"]
    assert (search["held"], search["failed"], search["is_settled"]) == (5.0, 6.0, True)
    assert found["report"]["client"]["most_in_flight"] == 5
