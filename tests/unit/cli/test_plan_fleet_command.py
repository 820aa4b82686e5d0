"""`headrace plan fleet`: a search is made, shown and drawn, and what cannot be is refused."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from headrace.cli import sim_progress
from headrace.cli.main import main
from headrace.core.cost.fitted import FittedCostModel
from headrace.live.cost_file import write_calibration
from support.calibrations import calibration_of

SMALL = (
    *("plan", "fleet", "--workload", "rag", "--prompt", "900", "--output", "3", "--load", "40"),
    *(
        "--requests",
        "40",
        "--tp",
        "1",
        "--split",
        "chunked",
        "--ttft-ms",
        "200",
        "--block-size",
        "64",
    ),
)


def test_a_fleet_is_found_shown_and_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot = tmp_path / "front.svg"
    words = (*SMALL, "--gpu", "h100-sxm", "--gpu", "a100-sxm-80gb", "--seeds", "2")
    assert main([*words, "--plot", str(plot)]) == 0
    printed = capsys.readouterr()
    assert "best" in printed.out
    assert "binds" in printed.out
    assert "prices an hour" in printed.err
    assert "% over 2 seeds" in printed.err
    ElementTree.fromstring(plot.read_text("utf-8"))
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["name"] in printed.out
    assert found["asked"]["slo"]["ttft_ms"] == 200.0
    assert found["provenance"]["kind"] == "fitted"
    assert found["best"]["usd_per_million_good_output_tokens"]["mean"] > 0


def test_who_waits_is_told_of_each_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sim_progress, "NOTE_EVERY_S", 0.0)
    monkeypatch.setattr(sim_progress, "SEEN_PER_LOOK", 1)
    assert main([*SMALL, "--seeds", "1", "--policy", "kv"]) == 0
    fleet = "chunked, kv, seed 0: 1 of 40 requests, "
    assert any(fleet in line for line in capsys.readouterr().err.splitlines())
    routing = ("plan", "routing", "--simulate", "--workload", "rag", "--prompt", "900")
    few = ("--workers", "2", "--requests", "20", "--seeds", "1", "--policy", "random")
    assert main([*routing, *few]) == 0
    told = capsys.readouterr().err.splitlines()
    assert any("random, seed 0: 1 of 20 requests, " in line for line in told)


def test_a_price_flips_the_winner(capsys: pytest.CaptureFixture[str]) -> None:
    winners = []
    for h100, a100 in (("0.5", "9"), ("9", "0.5")):
        prices = ("--price", f"H100 SXM={h100}", "--price", f"A100 SXM 80GB={a100}")
        gpus = ("--gpu", "H100 SXM", "--gpu", "A100 SXM 80GB")
        assert main([*SMALL, *gpus, *prices, "--seeds", "1", "--policy", "kv", "--json"]) == 0
        winners.append(json.loads(capsys.readouterr().out)["best"]["accelerator"])
    assert winners == ["H100 SXM", "A100 SXM 80GB"]


def test_nothing_that_holds_is_a_bad_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--model", "Meta-Llama-3.1-70B", "--gpu", "H100 SXM"]) == 1
    printed = capsys.readouterr()
    assert "weights take 141.1 of 80 GB" in printed.out
    assert "nothing that was tried holds" in printed.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--price", "H100 SXM"), "GPU=USD"),
        (("--price", "H100 SXM=-1"), "GPU=USD"),
        (("--price", "L4=1"), "L4"),
        (("--gpu", "H100 SXN"), "H100 SXM"),
        (("--split", "both"), "chunked"),
        (("--policy", "best"), "round_robin"),
        (("--attainment", "1.5"), "--attainment"),
        (("--load", "0"), "--load"),
        (("--requests", "1"), "--requests"),
        (("--seeds", "0"), "--seeds"),
        (("--speed", "2"), "--load"),
        (("--trace", "none.jsonl"), "none.jsonl"),
        (("--ttft-ms", "-1"), "--ttft-ms"),
        (("--plot", "a.png"), "SVG"),
        (("--ep", "3"), "EP 3 shares experts, and it has none"),
        (("--ep", "3", "--model", "deepseek-v3"), "EP 3 does not divide 256 experts"),
        (("--tp", "1", "--tp", "3"), "TP 3 does not divide 32 heads"),
        (("--cost", "none.json", "--gpu", "L4"), "leave one out"),
        (("--cost", "none.json", "--block-size", "32"), "--block-size too"),
        (("--cost", "none.json"), "--price none=USD"),
        (("--cost", "none.json", "--price", "some=1"), "machines: none"),
        (("--cost", "none.json", "--price", "none=0"), "--price none"),
        (("--cost", "a.json", "--cost", "b/a.json"), "two machines are called a"),
    ],
)
def test_what_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert main(["plan", "fleet", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_trace_says_its_own_load(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "\n".join(
            json.dumps(
                {"timestamp": i * 40, "input_length": 700, "output_length": 2, "hash_ids": [0, i]}
            )
            for i in range(1, 41)
        )
    )
    words = ("plan", "fleet", "--trace", str(trace), "--ttft-ms", "500", "--block-size", "64")
    assert main([*words, "--gpu", "h100-sxm", "--tp", "1", "--split", "chunked", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["load_per_s"] == pytest.approx(40 / 1.56)
    assert found["asked"]["demand"]["cached_share"] == pytest.approx(0.7132, abs=1e-3)
    assert main([*words, "--load", "3"]) == 2
    assert "--speed" in capsys.readouterr().err


ROUTING = (
    *("plan", "routing", "--simulate", "--workload", "rag", "--prompt", "600", "--output", "3"),
    *("--requests", "40", "--workers", "3", "--seeds", "1", "--block-size", "64"),
)


def test_policies_of_the_router_meet_the_same_requests(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot = tmp_path / "policies.svg"
    assert main([*ROUTING, "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    for policy in ("kv", "prefix", "session", "least_loaded", "power_of_two", "round_robin"):
        assert policy in out
    ElementTree.fromstring(plot.read_text("utf-8"))
    assert main([*ROUTING, "--policy", "kv", "--policy", "random", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    kv, random = found["policies"]
    assert (kv["policy"], random["policy"]) == ("kv", "random")
    assert kv["load_per_s"] == random["load_per_s"]
    assert min(kv["ttft_to_best"], random["ttft_to_best"]) == 1.0
    assert kv["imbalance"] < random["imbalance"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--simulate", "--preset", "reference-20"), "neither --preset"),
        (("--simulate", "--hold-s", "3"), "only counted"),
        (("--workload", "chat"), "--simulate"),
        (("--policy", "kv"), "--simulate"),
        (("--simulate", "--policy", "best"), "least_loaded"),
        (("--simulate", "--model", "Meta-Llama-3.1-70B"), "weights take"),
        (("--simulate", "--workers", "0"), "--workers"),
        (("--simulate", "--cost", "none.json", "--tp", "2"), "leave out --gpu and --tp"),
        (("--simulate", "--cost", "none.json", "--engine", "ideal"), "--engine too"),
        (("--cost", "none.json"), "--simulate"),
    ],
)
def test_routing_that_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert main(["plan", "routing", *words]) == 2
    assert said in capsys.readouterr().err


CALIBRATED = (
    *("--workload", "chat", "--prompt", "150", "--output", "12", "--ttft-ms", "2000"),
    *("--tpot-ms", "400", "--requests", "20"),
)


def test_the_cheaper_of_calibrated_machines_is_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    slow, fast = tmp_path / "slow.json", tmp_path / "fast.json"
    prior = FittedCostModel.prior()
    write_calibration(slow, calibration_of(steps=prior.slower(4.0)))
    write_calibration(fast, calibration_of())
    words = ("--load", "1.5", "--seeds", "1", "--policy", "kv", "--split", "chunked", "--json")
    machines = ("--cost", str(slow), "--cost", str(fast))
    winners = []
    for slow_usd, fast_usd in (("0.1", "9"), ("9", "0.1")):
        prices = ("--price", f"slow={slow_usd}", "--price", f"fast={fast_usd}")
        assert main(["plan", "fleet", *machines, *prices, *CALIBRATED, *words]) == 0
        found = json.loads(capsys.readouterr().out)
        winners.append(found["best"]["accelerator"])
    assert winners == ["slow", "fast"]
    assert found["best"]["num_gpus"] == 1
    assert found["provenance"]["kind"] == "calibrated"
    assert any("machine and hour" in one for one in found["provenance"]["sources"])


def test_machines_without_measured_copies_do_not_hand_over(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_calibration(tmp_path / "one.json", calibration_of())
    words = ("--cost", str(tmp_path / "one.json"), "--price", "one=1", "--split", "disaggregated")
    assert main(["plan", "fleet", *words, *CALIBRATED]) == 1
    assert "copies of KV were not measured" in capsys.readouterr().out


def test_policies_route_among_calibrated_workers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Two share a machine: three would leave one with half of its company."""
    file = tmp_path / "two.json"
    write_calibration(file, calibration_of())
    told = ("--cost", str(file), "--seeds", "1", "--load", "1")
    words = ("plan", "routing", "--simulate", *CALIBRATED, *told)
    assert main([*words, "--policy", "kv", "--policy", "round_robin", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_workers"] == 2
    assert [one["policy"] for one in found["policies"]] == ["kv", "round_robin"]
    assert found["provenance"]["sources"][2] == "2 workers share the cores of each machine"
    assert main([*words, "--workers", "3"]) == 2
    assert "a multiple of 2" in capsys.readouterr().err
