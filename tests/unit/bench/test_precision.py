"""The perplexity of every arithmetic, each beside the exact one."""

import math
from pathlib import Path

import pytest

from headrace.bench.precision import TEXTS, measure_precision, read_texts
from headrace.bench.tables import precision_table
from headrace.cli.main import main
from headrace.models.load import load_model
from headrace.ops.interface import KvLayout
from support.greedy import log_likelihoods
from support.tiny_model import write_tiny_model

native = pytest.importorskip("headrace.ops.native.backend")

SHORT, LONG = "a headrace", "brings the water to the wheel. " * 12  # longer than a chunk


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def test_each_arithmetic_is_compared_with_the_exact_one(model: Path) -> None:
    measured = list(measure_precision(model, [SHORT, LONG]))
    assert [(one.activations, one.kv_dtype) for one in measured] == [
        (activations, kv)
        for activations in ("f32", "int12", "int8")
        for kv in ("bf16", "int8", "fp8")
    ]
    first, *others = measured
    assert (first.change, first.change_error) == (0, 0)
    for one in others:
        assert one.perplexity == pytest.approx(first.perplexity * (1 + one.change), rel=1e-9)
        assert 0 < one.change_error < 1
        assert one.num_tokens == first.num_tokens
    assert precision_table(measured).row_count == 9


def test_the_perplexity_is_that_of_the_texts(model: Path) -> None:
    backend = native.NativeBackend(threads=1, activations="f32")
    loaded = load_model(model, backend)
    shape = loaded.model
    layout = KvLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, 64)
    program = backend.compile(shape.forward, layout, 64)
    found = []
    for text in (SHORT, LONG):
        tokens = loaded.tokenizer.encode(text, add_special=False)
        found += log_likelihoods(program, tokens, chunk_tokens=64)
    first = next(iter(measure_precision(model, [SHORT, LONG])))
    assert first.num_tokens == len(found)
    assert first.perplexity == pytest.approx(math.exp(-sum(found) / len(found)), rel=1e-9)


def test_a_text_that_is_not_there(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "precision", str(model), "--text", "/no/such/text"]) == 2
    assert "--text" in capsys.readouterr().err


def test_the_command_prints_a_row_for_each(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.txt"
    path.write_text(SHORT)
    assert main(["bench", "precision", str(model), "--text", str(path)]) == 0
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines() if "f32" in line] == [
        "bf16",
        "int8",
        "fp8",
    ]


def test_the_texts_of_a_checkout_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    assert len(read_texts(TEXTS)) == len(TEXTS)
