"""`headrace bench`: what is asked for reaches the parts, and figures come back."""

import json
from pathlib import Path

import pytest

from headrace.bench import suite
from headrace.bench.__main__ import words
from headrace.bench.baseline import Baseline, Figures, write_baseline
from headrace.bench.machine import machine
from headrace.bench.routing import POLICIES, Traffic
from headrace.bench.scheduler import measure
from headrace.cli import bench_baseline
from headrace.cli.main import main
from support.fake_engine import byte_tokenizer, formula_model
from support.http_server import RunningServer
from support.tiny_model import write_tiny_model


def test_kernels_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "tiny.gguf")
    out = tmp_path / "new" / "kernels.json"
    line = ["bench", "kernels", str(model), "--seconds", "0.3", "--threads", "1", "--json"]
    assert main([*line, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    figures = json.loads(printed.out)
    assert figures == json.loads(out.read_text())
    assert printed.err == f"written to {out}\n"
    assert figures["machine"]["load_average"] >= 0
    assert figures["kernels"]["limits"]["read_bytes_per_s"] > 0
    assert {"name", "median_ms", "gbytes_per_s", "gflop_per_s", "share", "bound"} <= set(
        figures["kernels"]["steps"][0]
    )


def test_tables_are_plain_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "measure_all", lambda: [measure(num_seqs=6, num_steps=4)])
    assert main(["bench", "scheduler"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:1] == ["6"] for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_routing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    traffic = Traffic(num_requests=6, num_prompt_tokens=64, num_output_tokens=2, num_prefixes=2)
    monkeypatch.setattr(suite, "TRAFFICS", (traffic,))
    small = ["--workers", "3", "--replicas", "2000", "--decisions", "5"]
    assert main(["bench", "router", *small]) == 0
    assert "3 workers, 2,304 block replicas" in capsys.readouterr().out
    assert main(["bench", "router", *small, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["router"]["mean_hit_blocks"] == 128
    assert [one["policy"] for one in figures["policies"]] == list(POLICIES)
    assert main(["bench", "router", "--workers", "0"]) == 2


def test_loads_of_two_servers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "tokenizer_of", lambda _: byte_tokenizer())
    with formula_model(max_model_len=4096) as one, formula_model(max_model_len=4096) as two:
        servers = [RunningServer(one), RunningServer(two)]
        try:
            urls = [word for server in servers for word in ("--url", server.url)]
            line = ["bench", "load", *urls, "--tokenizer", "any", "--load", "prefill"]
            assert main([*line, "--rounds", "1", "--json"]) == 0
        finally:
            for server in servers:
                server.stop()
                server.join()
    figures = json.loads(capsys.readouterr().out)
    assert [side["url"] for side in figures["sides"]] == [server.url for server in servers]
    assert {row["load"] for row in figures["comparisons"]} == {"prefill"}
    assert all(len(row["medians"]) == len(row["ratios"]) == 2 for row in figures["comparisons"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("load", "there is no server to load"),
        ("load --url http://127.0.0.1:1 --load none", "there is no such load (load=none"),
        ("load --url http://127.0.0.1:1 --extra [1]", "--extra is no JSON object"),
        ("load --url http://127.0.0.1:1 --rounds 0", "at least one round"),
        ("kernels --seconds 0", "--seconds must be positive"),
        ("kernels --seconds nan", "--seconds must be positive"),
        ("scheduler --out /", "/: cannot be written: is a directory"),
        ("all --serve 'x", """--serve is "'x": no closing quotation"""),
        ("compare nowhere.json", "there is no baseline"),
        ("speed", 'unknown command "speed"'),
    ],
)
def test_wrong_words(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *line.split()]) == 2
    assert message in capsys.readouterr().err


def test_the_module_is_another_name_of_the_command() -> None:
    assert words([]) == ["bench", "all"]
    assert words(["--seed", "2"]) == ["bench", "all", "--seed", "2"]
    assert words(["load", "--url", "u"]) == ["bench", "load", "--url", "u"]
    assert words(["--help"]) == ["bench", "--help"]


def baseline(count: float) -> Baseline:
    counts = Figures(valid_for={}, values={"a": count, "b": 7}, tolerance=0.05, is_less_better=True)
    return Baseline(machine=machine(), kinds={"counts": counts})


@pytest.mark.parametrize(("count", "code"), [(104, 0), (120, 1)])
def test_compare_exits_with_one_where_something_moved(
    count: float,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "baseline.json"
    write_baseline(path, baseline(100))
    monkeypatch.setattr(bench_baseline, "measure_baseline", lambda **_: baseline(count))
    assert main(["bench", "compare", str(path)]) == code
    out = capsys.readouterr().out
    assert (["a", "100", "120", "+20.0%", "worse"] in map(str.split, out.splitlines())) == code
    assert f"2 figures compared, {code} changed" in out
    assert main(["bench", "compare", str(path), "--json"]) == code
    assert len(json.loads(capsys.readouterr().out)["changes"]) == code
