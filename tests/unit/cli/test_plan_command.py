"""`headrace plan`: what is asked for is computed, shown, drawn, and refused where it cannot be."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from headrace.cli.main import main
from headrace.cli.plan_answer import seconds, short
from headrace.core.cost.fitted import FittedCostModel, Link
from headrace.core.cost.model import StepShape
from headrace.live.cost_file import write_calibration
from support.calibrations import calibration_of


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def table(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    assert main(["plan", *words]) == 0
    printed = capsys.readouterr()
    return printed.out, printed.err


def test_roofline_of_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = table(capsys, "roofline", "--preset", "reference-70b-h100")
    for words in ("ridge 295", "16.1k", "7.8 ", "2.32 s", "42.7 ms", "24.17 s", "2,304-token"):
        assert words in out
    assert "warning: 140 GB of weights do not fit one 80 GB H100" in err
    found = figures(capsys, "roofline", "--preset", "reference-70b-h100")
    assert round(found["e2e_s"], 4) == 24.1670
    assert found["warnings"]
    assert found["provenance"]["kind"] == "data sheet"


def test_roofline_of_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("roofline", "--model", "qwen3-32b", "--tp", "2", "--batch", "64")
    ideal, fitted = figures(capsys, *words), figures(capsys, *words, "--engine", "vllm")
    assert fitted["tpot_s"] > ideal["tpot_s"]
    assert fitted["provenance"]["kind"] == "fitted"
    assert "silicon_sample" in " ".join(fitted["provenance"]["sources"])


def test_goodput_of_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = table(capsys, "goodput", "--preset", "reference-70b-h100")
    for words in ("1140 ms", "94 ms", "747 ms", "63 ms", "6.8/s", "12.1/s", "9.4 / 2.6", "1.8×"):
        assert words in out
    assert "22/s" in out
    assert "weights do not fit" in err
    found = figures(capsys, "goodput", "--preset", "reference-70b-h100")
    assert found["load_per_s"] == 9.0
    assert len(found["verdicts"]) == 6


def test_goodput_of_a_model_on_workers_of_several_devices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("goodput", "--model", "qwen3-32b", "--tp", "2", "--gpus", "16", "--engine", "vllm")
    found = figures(capsys, *words, "--workload", "rag", "--page-model", "--kv-link-gb-s", "50")
    assert found["num_workers"] == 8
    assert found["slo"] == {"ttft_ms": 2000.0, "itl_ms": None, "tpot_ms": 80.0, "e2e_ms": None}
    assert found["provenance"]["kind"] == "fitted"
    overloaded = figures(capsys, *words, "--load", "100000")
    assert all(one["ttft_s"] is None for one in overloaded["verdicts"])


def test_a_load_that_nothing_broke_is_no_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """A few requests at once queue too shortly for any limit to break."""
    words = ("goodput", "--prompt", "800", "--output", "4")
    few = figures(capsys, *words, "--gpus", "1", "--simulate", "3")
    simulated = [one for one in few["verdicts"] if one["model"] == "simulator"]
    assert "nothing found" in [one["binds"] for one in simulated]
    assert any("with 3 requests no load that was tried broke" in one for one in few["warnings"])
    assert not any("no load" in one for one in figures(capsys, *words)["warnings"])


def test_goodput_of_a_calibrated_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Formulas take all workers for busy; the simulator sees who is in a step, and what passes
    around steps.
    """
    file = tmp_path / "cost.json"
    write_calibration(file, calibration_of(kv_link=Link(latency_ns=3e6, byte_ns=1e5)))
    words = ("goodput", "--cost", str(file), "--prompt", "160", "--output", "8", "--load", "0.5")
    found = figures(capsys, *words, "--simulate", "20")
    assert found["num_workers"] == 2
    assert found["design_batch_seqs"] == 16  # as many as were seen
    prompt = StepShape(160, 1, 1, 160 * 161 // 2, 160)
    alone_s = FittedCostModel.prior().step_ns(prompt) / 1e9
    assert found["prefill_worker_s_per_request"] == pytest.approx(1.5 * alone_s)
    by_mode = {(one["model"], one["mode"]): one for one in found["verdicts"]}
    assert len(by_mode) == 6
    simulated = by_mode["simulator", "co-located, prefill first"]["ttft_s"]
    # Some 5 ms to the engine and 6 ms back.
    assert alone_s + 0.010 < simulated < 1.5 * alone_s + 0.011
    slow = calibration_of(kv_link=Link(latency_ns=103e6, byte_ns=1e5))
    write_calibration(file, slow)
    again = {(one["model"], one["mode"]): one for one in figures(capsys, *words)["verdicts"]}
    split = ("closed form", "disaggregated")
    assert again[split]["ttft_s"] - by_mode[split]["ttft_s"] == pytest.approx(0.1)
    assert found["provenance"]["kind"] == "calibrated"
    long = figures(capsys, *words[:3], "--prompt", "9000", "--gpus", "1")
    assert long["warnings"] == ["requests of 9,211 tokens: it takes 4,096"]
    assert "each worker has a machine of its own" in long["provenance"]["sources"]
    assert any("9,000 tokens: seen" in one for one in long["provenance"]["extrapolates"])


def test_kv_of_a_layout_and_of_the_usual_ones(capsys: pytest.CaptureFixture[str]) -> None:
    usual = figures(capsys, "kv", "--model", "qwen3-8b", "--length", "4096", "--length", "100")
    assert [row["layout"] for row in usual["layouts"]] == ["1 GPU", "TP2", "TP4", "TP8"]
    assert list(usual["kv_bytes_per_request_by_tokens"]) == ["100", "4096"]
    own = figures(capsys, "kv", "--model", "qwen3-8b", "--tp", "2", "--pp", "2")
    assert [row["layout"] for row in own["layouts"]] == ["TP2 PP2"]
    out, err = table(capsys, "kv", "--preset", "reference-70b-h100")
    assert "160,000 B" in out
    assert "140 GB of weights leave no room" in err


@pytest.mark.parametrize(
    ("words", "layouts"),
    [
        (("--model", "qwen2.5-7b"), ["1 GPU", "TP2", "TP4"]),
        (("--model", "smollm2-135m"), ["1 GPU"]),
        (("--model", "qwen3-8b", "--gpu", "h100-pcie"), ["1 GPU", "TP2"]),
    ],
)
def test_kv_of_no_layout_that_cannot_be(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], layouts: list[str]
) -> None:
    assert [one["layout"] for one in figures(capsys, "kv", *words)["layouts"]] == layouts


def test_sizes_are_shown_as_people_read_them(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = table(capsys, "roofline", "--model", "deepseek-v3", "--gpu", "h200-sxm")
    assert "1,342 GB" in out
    out, _ = table(capsys, "kv", "--model", "smollm2-135m", "--length", "1", "--length", "100000")
    assert "23 kB" in out
    assert "2.3 GB" in out
    assert "e+" not in out
    assert "e-" not in out
    assert [short(one) for one in (999.4, 999.7, 999_700.0, 1.5e18)] == [
        "999",
        "1k",
        "1M",
        "1,500P",
    ]
    assert [seconds(one) for one in (0.00099961, 0.9996, 24170.0)] == [
        "1 ms",
        "1.00 s",
        "24,170.00 s",
    ]


def test_parallel_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = table(capsys, "parallel", "--model", "qwen3-32b", "--gpus", "4", "--engine", "vllm")
    assert "TP2 DP2" in out
    assert "confirmed" in out
    assert "from: fitted" in err
    found = figures(capsys, "parallel", "--model", "qwen3-32b", "--gpus", "4")
    assert found["layouts"][0]["output_tokens_per_s"] > 0


def test_routing_of_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = table(capsys, "routing", "--preset", "reference-20")
    for words in ("10/14", "11/14", "6,160", "123 ms", "S1 S2* S4* S9* S16*", "5 5 5 5"):
        assert words in out
    assert "from: counted" in err


def test_routing_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 1000, "output_length": 9, "hash_ids": [%d, %d]}\n'
    file.write_text("".join(line % (1000 * i, i % 2, 10 + i) for i in range(100)))
    words = ("routing", "--trace", str(file), "--workers", "3", "--hold-s", "5")
    found = figures(capsys, *words)
    tokens = {run["policy"]: run["cached_tokens"] for run in found["policies"]}
    # Round robin takes each of the two prefixes to all three workers, KV-aware to two of them.
    assert tokens["round robin"] == (100 - 6) * 512
    assert tokens["KV-aware"] == (100 - 4) * 512
    assert found["prompt_tokens"] == 100_000
    assert "worker 1" not in table(capsys, *words)[0]  # too many to list


def test_routing_of_a_trace_that_names_no_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6,700,5\n")
    found = figures(capsys, "routing", "--trace", str(file))
    assert found["prompt_tokens"] == 700
    assert [run["num_hits"] for run in found["policies"]] == [0, 0, 0]


def test_own_presets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        "[accelerators.Mine]\nbf16_tflop_per_s = 1\nmemory_gb = 10\nmemory_tb_per_s = 0.1\n"
    )
    found = figures(capsys, "roofline", "--gpu", "mine", "--presets", str(file))
    assert found["ridge_flop_per_byte"] == 10


def test_rates_of_small_machines_are_not_rounded_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cost.json"
    write_calibration(file, calibration_of(num_workers=1))
    words = ("goodput", "--cost", str(file), "--prompt", "3000", "--output", "20")
    out, _ = table(capsys, *words, "--ttft-ms", "20000")
    found = figures(capsys, *words, "--ttft-ms", "20000")
    assert 0.3 < found["capacity_per_s"] < 0.5
    assert f"(capacity {found['capacity_per_s']:.2g}/s)" in out
    assert f"{found['verdicts'][0]['sustainable_per_s']:.2g}/s" in out


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("roofline", "--preset", "reference-70b-h100"), id="roofline"),
        pytest.param(("goodput", "--preset", "reference-70b-h100"), id="goodput"),
        pytest.param(("routing", "--ratio", "0.5"), id="routing"),
        pytest.param(("kv", "--model", "qwen3-8b"), id="kv"),
    ],
)
def test_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    file = tmp_path / "new" / "picture.svg"
    _, err = table(capsys, *words, "--plot", str(file))
    assert f"written to {file}" in err
    root = ElementTree.fromstring(file.read_text())
    assert list(root.iter("{http://www.w3.org/2000/svg}polyline"))


def test_claims_say_how_far_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.cli.sim_progress.NOTE_EVERY_S", 0.0)
    _, err = table(capsys, "claims", "batching", "--requests", "20")
    for run in ("batching, static, up to 32: ", "batching, continuous, up to 1536: "):
        assert f"{run}1 of 20 requests, " in err


def test_a_picture_of_claims(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one that is counted; the others are simulated, and slow."""
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]}\n'
    trace.write_text("".join(line % at for at in (0, 1000)))
    file = tmp_path / "claims.svg"
    out, err = table(capsys, "claims", "hits", "--trace", str(trace), "--plot", str(file))
    assert f"written to {file}" in err
    words = [one.text for one in ElementTree.fromstring(file.read_text()).iter() if one.text]
    assert "50.00 %" in words
    assert "50.00 %" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("roofline --gpu h10", "unknown accelerator 'h10'"),
        ("roofline --model llama", "unknown model 'llama'"),
        ("roofline --engine vlm", "vllm"),
        ("roofline --batch 0", "--batch is 0"),
        ("roofline --prompt 0", "--prompt takes from 1 to"),
        ("roofline --tp 0", "--tp takes from 1 to"),
        ("roofline --tp 2 --ep 2", "EP 2 shares experts, and it has none"),
        ("roofline --model deepseek-v3 --tp 4 --ep 2", "EP 2 is neither 1 nor TP · DP = 4"),
        ("roofline --tp 3", "TP 3 does not divide 32 heads"),
        ("roofline --pp 64", "PP 64 is more than 32 layers"),
        ("roofline --weights fp3", "known: f32, bf16"),
        ("roofline --workload batch", "known: chat, agent, rag"),
        ("roofline --plot x.png", "pictures are SVG"),
        ("claims --plot x.png", "pictures are SVG"),
        ("claims --plot /dev/null/x.svg", "/dev/null/x.svg: cannot be written"),
        ("fleet --plot /proc/x.svg", "/proc/x.svg: cannot be written"),
        ("routing --trace /dev/zero", "/dev/zero: cannot be read: not a regular file"),
        ("roofline --preset nothing", "reference-70b-h100"),
        ("roofline --preset reference-70b-h100 --tp 2", "says what runs already"),
        ("roofline --gpu rtx-4090 --tp 16", "has no link that TP16 needs"),
        ("kv --length 0", "--length is 0"),
        ("routing --ratio 1.1", "--ratio takes from 0 to 1"),
        ("routing --workers 0", "--workers is 0"),
        ("routing --hold-s -1", "--hold-s is -1"),
        ("routing --preset reference-20 --workers 5", "leave out the other flags"),
        ("routing --preset reference-21", "reference-20"),
        ("routing --trace none.jsonl", "none.jsonl: cannot be read: no such file"),
        ("routing --trace x --ratio 0.5", "leave out --ratio or --trace"),
        ("parallel --gpus 0", "--gpus is 0"),
        ("parallel --model deepseek-v3 --gpus 1", "more --gpus"),
        ("parallel --concurrency 0", "--concurrency is 0"),
        ("goodput --load 0", "--load is 0"),
        ("goodput --load nan", "--load is nan"),
        ("goodput --gpus 7 --tp 2", "make --gpus a multiple of 2"),
        ("goodput --dp 2", "say --gpus instead"),
        ("goodput --pp 2", "stages overlap"),
        ("goodput --cost none.json", "none.json"),
        ("goodput --cost none.json --tp 2", "--cost FILE says what runs already"),
        ("goodput --cost none.json --kv-link-gb-s 2", "does not know how large KV is"),
        ("goodput --ttft-ms -1", "--ttft-ms is -1"),
        ("goodput --attainment 0.9", "say --simulate N"),
        ("goodput --seed 3", "say --simulate N"),
        ("goodput --simulate 9 --attainment 2", "--attainment is 2"),
        ("goodput --simulate 0", "--simulate is 0"),
        ("goodput --chunk 0", "--chunk is 0"),
        ("goodput --kv-link-gb-s 0", "--kv-link-gb-s is 0"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], words: str, told: str) -> None:
    assert main(["plan", *words.split()]) == 2
    assert told in capsys.readouterr().err
