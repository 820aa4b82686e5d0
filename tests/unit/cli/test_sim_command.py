"""`headrace sim` says what was asked and what came of it, and refuses what cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.sim import SimAsked, sim
from headrace.cli.sim_flags import SimFlags
from headrace.core.base.errors import ConfigError

TRACE = Path(__file__).parents[2] / "support" / "traces" / "mooncake_head.jsonl"


def run(capsys: pytest.CaptureFixture[str], file: str | None = None, **flags: Any) -> Any:
    assert sim(SimFlags(**flags), file, as_json=True) == 0
    return json.loads(capsys.readouterr().out)


def test_figures_of_a_workload(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, requests=12, mixed=2, workload="rag", output=20, load=4.0)
    assert found["num_requests"] == 12
    assert found["goodput_per_s"] == pytest.approx(found["num_good"] / found["span_s"])
    assert 0.0 <= found["attainment_low"] <= found["attainment"] <= found["attainment_high"] <= 1.0
    assert found["ttft_ms"]["p50"] <= found["ttft_ms"]["p99"]
    assert [role["role"] for role in found["roles"]] == ["mixed"]
    assert found["asked"]["engine"] == "vllm"
    assert found["provenance"]["sources"]
    again = run(capsys, requests=12, mixed=2, workload="rag", output=20, load=4.0)
    assert again == found
    assert run(capsys, requests=12, mixed=2, workload="rag", output=20, load=4.0, seed=1) != found


def test_requests_that_are_all_alike(capsys: pytest.CaptureFixture[str]) -> None:
    alike: dict[str, Any] = {"spread": 0.0, "shared": 0.0, "burstiness": 0.0, "load": 0.1}
    found = run(capsys, requests=6, mixed=1, workload="rag", prompt=900, output=9, **alike)
    assert found["ttft_ms"]["p50"] == pytest.approx(found["ttft_ms"]["p99"], rel=1e-3)
    assert found["hit_rate"] < 0.002
    assert found["num_requests"] == 6


def test_a_trace_on_split_workers_by_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "split.toml"
    file.write_text('prefill = 1\ndecode = 1\nhandoff = "always"\nmixed = 0\nrequests = 6\n')
    found = run(capsys, str(file), trace=str(TRACE), requests=5, block_size=64)
    assert found["num_requests"] == found["num_handoffs"] == 5
    assert {role["role"] for role in found["roles"]} == {"prefill", "decode"}
    assert found["hit_rate"] > 0.0  # the first block of all prompts


def test_a_load_that_was_not_reached_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Sessions wait between their requests, so a short run of them has less."""
    asked: dict[str, Any] = {"requests": 12, "mixed": 1, "output": 4, "load": 5.0}
    found = run(capsys, **asked)
    assert found["load_asked_per_s"] == 5.0
    assert found["load_per_s"] < 4.0
    sim(SimFlags(**asked), None, as_json=False)
    assert f"{found['load_per_s']:.2f} requests/s, 5.00 asked for (sessions" in (
        capsys.readouterr().out
    )
    ramp = tmp_path / "ramp.toml"
    ramp.write_text("rates = [[0, 1], [10, 5]]")
    with pytest.raises(ConfigError, match="--load is 5, and rates are given too"):
        sim(SimFlags(**asked), str(ramp), as_json=True)


def test_as_many_requests_are_under_way_as_there_are_clients(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By Little's law, but for the few who end alone."""
    found = run(capsys, requests=60, mixed=1, workload="rag", output=20, concurrency=3)
    assert found["num_requests"] == 60
    assert found["load_asked_per_s"] is None
    under_way = 60 / found["span_s"] * found["e2e_ms"]["mean"] / 1000
    assert under_way == pytest.approx(3.0, rel=0.1)
    assert found["load_per_s"] == pytest.approx(60 / found["end_s"])


@pytest.mark.parametrize("flags", [{"concurrency": 9}, {"load": 1.0, "requests": 1}])
def test_rates_of_requests_that_come_at_once_last_until_their_ends(
    capsys: pytest.CaptureFixture[str], flags: dict[str, Any]
) -> None:
    found = run(capsys, **{"requests": 8, "mixed": 1, "workload": "rag", "output": 20, **flags})
    assert found["load_per_s"] * found["span_s"] == pytest.approx(found["num_requests"])
    assert found["span_s"] * 1000 == pytest.approx(found["e2e_ms"]["p99"])


def test_a_client_who_was_refused_asks_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As many times as there are clients, and more."""
    trace = tmp_path / "trace.jsonl"
    lengths = [300_000 if number % 3 == 1 else 900 for number in range(24)]
    trace.write_text(
        "".join(
            f'{{"timestamp": {400 * number}, "input_length": {length}, "output_length": 5,'
            ' "hash_ids": []}\n'
            for number, length in enumerate(lengths)
        )
    )
    found = run(capsys, trace=str(trace), concurrency=2, mixed=1)
    assert (found["num_requests"], found["num_rejected"]) == (24, 8)
    later = run(capsys, trace=str(trace), mixed=1, warm_up_s=4.7)
    assert (later["num_requests"], later["num_rejected"]) == (12, 4)


def test_limits_are_missed_for_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {"requests": 12, "mixed": 1, "workload": "rag", "output": 4}
    found = run(capsys, **asked, load=1000.0, ttft_ms=100.0)
    assert found["attainment"] < 1.0
    assert sum(found["num_misses_by_metric_and_cause"]["ttft"].values()) > 0
    assert sim(SimFlags(**asked, load=1000.0, ttft_ms=100.0), None, as_json=False) == 0
    assert "why limits were missed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ({"workload": "poetry"}, "poetry"),
        ({"requests": 0}, "--requests"),
        ({"load": -1.0}, "--load"),
        ({"policy": "best"}, "known: kv"),
        ({"trace": "nowhere.jsonl"}, "nowhere.jsonl: cannot be read"),
        ({"trace": "/dev/zero"}, "not a regular file"),
        ({"trace": __file__}, f"{__file__}: the trace is of no known kind"),
        ({"trace": str(TRACE), "load": 3.0}, "--load is 3.0, and the trace has its own"),
        ({"trace": str(TRACE), "spread": 0.0}, "--spread is 0.0, and the trace has its own"),
        ({"shared": 1.0}, "--shared is 1"),
        ({"trace": str(TRACE), "output": 3}, "--output"),
        ({"speed": 2.0}, "--speed is 2, and there is no trace"),
        ({"prefill": 2}, "workers that decode"),
        ({"concurrency": 3, "load": 2.0}, "--load is 2.0, and --concurrency"),
        ({"concurrency": 0}, "--concurrency is 0"),
        ({"model": "meta-llama-3.1-70b"}, "no room for KV"),
    ],
)
def test_what_cannot_be(flags: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        sim(SimFlags(**flags), None, as_json=True)


def test_a_file_has_the_names_of_flags(tmp_path: Path) -> None:
    file = tmp_path / "asked.toml"
    file.write_text("load = 3.0\nrates = [[0, 1], [60, 5]]\n")
    asked = SimAsked.of(SimFlags(load=4.0), str(file))
    assert (asked.load, asked.rates) == (4.0, ((0.0, 1.0), (60.0, 5.0)))
    for text, told in (
        ("lode = 3.0\n", "lode"),
        ("rates = " + "[" * 9999, "cannot simulate"),
        ("load = " + "9" * 5000, "cannot simulate"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=told):
            SimAsked.of(SimFlags(), str(file))


def test_an_autoscaler_says_what_it_decided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One prompt a second asks for little: of four workers, some go."""
    flags: dict[str, Any] = {"requests": 500, "workload": "rag", "output": 8, "load": 1.0}
    pools: dict[str, Any] = {"prefill": 2, "decode": 2, "handoff": "always", "spread": 0.0}
    found = run(capsys, **flags, **pools, autoscale=True)
    assert {"drain", "scale"} == {row["decision"] for row in found["decisions"]}
    assert all(0 < row["second"] < 500 for row in found["decisions"])
    drained = {row["workers"] for row in found["decisions"] if row["decision"] == "drain"}
    assert drained <= {f"worker-{number}" for number in range(4)}
    assert found["num_requests"] == 500
    assert "decisions" not in run(capsys, **{**flags, "requests": 8}, **pools)
    assert sim(SimFlags(**flags, **pools, autoscale=True), None, as_json=False) == 0
    assert "autoscaler: 0 changes of roles, 4 workers at most" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_workers": 3}, "nobody would start or end any"),
        ({"autoscale": True, "mixed": 1, "prefill": 1, "decode": 1}, "one kind"),
        ({"autoscale": True, "max_workers": 0}, "--max-workers"),
        (
            {"autoscale": True, "mixed": 2, "min_workers": 5, "max_workers": 4},
            "--min-workers is 5 for each pool, and --max-workers is 4",
        ),
        (
            {"autoscale": True, "mixed": 6, "max_workers": 4},
            "6 workers are there at the begin, and --max-workers is 4",
        ),
    ],
)
def test_workers_that_cannot_be_scaled(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sim(SimFlags(requests=4, workload="rag", **flags), None, as_json=True)
