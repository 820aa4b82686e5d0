"""The kernel benchmark of a tiny model: work is counted by hand, times are only there."""

from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from headrace.bench.cells import Cell
from headrace.bench.census import Census, KnowingBackend
from headrace.bench.kernels import KernelReport, measure_kernels
from headrace.bench.operations import largest_of_each_type
from headrace.bench.results import show_kernels
from headrace.core.base.errors import ConfigError
from headrace.models.load import load_model
from headrace.ops.native.backend import NativeBackend
from support.tiny_model import HEADS, HIDDEN, KV_HEADS, LAYERS, MLP, VOCAB, write_tiny_model

HEAD_DIM = HIDDEN // HEADS
KV_WIDTH = HEAD_DIM * KV_HEADS


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def report(path: Path) -> KernelReport:
    # Ample: on a busy machine, too, nothing is left out for want of time.
    return measure_kernels(str(path), threads=1, seconds=10.0)


@pytest.fixture
def book(path: Path) -> tuple[Census, KnowingBackend]:
    book = KnowingBackend(NativeBackend(1, activations="f32"))
    loaded = load_model(path, book)
    loaded.close()
    census = Census(book.weights)
    loaded.model.forward(census)
    return census, book


def test_work_is_that_of_the_layers(book: tuple[Census, KnowingBackend]) -> None:
    census, backend = book
    cell = Cell(name="", num_seqs=2, num_tokens=3, start=5)
    qkv, output = HIDDEN * (HIDDEN + 2 * KV_WIDTH), HIDDEN * HIDDEN
    mlp, head = 3 * HIDDEN * MLP, VOCAB * HIDDEN
    # All six rows until the last attention, and then those two that have logits.
    linear = 2 * (6 * (LAYERS * qkv + (LAYERS - 1) * (output + mlp)) + 2 * (output + mlp + head))
    attention = LAYERS * 4 * HIDDEN * 2 * (6 + 7 + 8)
    work = census.work(cell, backend.backend)
    assert work.operations == {"f32": linear + attention}
    assert work.kv_bytes == LAYERS * 2 * 2 * KV_WIDTH * 2 * 8
    # The embedding is the head, too, and is read once; norms are left out.
    matrices = [known for known in backend.weights.values() if known.rows > 1]
    assert work.weight_bytes == sum(known.num_bytes for known in matrices)


def test_products_depend_on_the_types_of_weights(book: tuple[Census, KnowingBackend]) -> None:
    census, _ = book
    cell = Cell(name="")
    exact = census.work(cell, NativeBackend(1, activations="f32")).operations
    backend = NativeBackend(1, isa="portable", activations="int8")
    rounded = census.work(cell, backend).operations
    assert set(rounded) == {"f32", "int8"}
    assert sum(rounded.values()) == exact["f32"]


def test_the_largest_weights_of_each_type_are_taken(book: tuple[Census, KnowingBackend]) -> None:
    census, _ = book
    shapes = {str(g[0].type): (g[0].rows, g[0].cols, len(g)) for g in largest_of_each_type(census)}
    # In Q8_0: the embedding and head, larger than what the layers have of any shape.
    assert shapes["q8_0"] == (VOCAB, HIDDEN, 1)
    assert shapes["f16"] == (MLP, HIDDEN, LAYERS)
    assert shapes["f32"] == (KV_WIDTH, HIDDEN, LAYERS)


def test_a_report_has_every_step_that_fits(report: KernelReport) -> None:
    steps = [(row.name, row.activations) for row in report.steps]
    names = ["decode 1 at 320", "decode 8 at 320", "decode 32 at 320", "chunk of 512 at 0"]
    has_tiles = NativeBackend(1).bf16_products == "tiles"
    kinds = ("f32", "int12", "int8") if has_tiles else ("f32", "int8")
    assert steps == [(name, kind) for kind in kinds for name in names]
    assert all(row.median_ms >= row.fastest_ms > 0 and row.num_runs > 0 for row in report.steps)
    assert all(row.share and row.bound for row in report.steps)
    longer = [line for line in report.left_out if "longer than the model's context" in line]
    assert len(longer) == 7


def test_rates_are_those_of_the_median(report: KernelReport) -> None:
    for row in report.steps:
        rate = (row.weight_bytes + row.kv_bytes) / (row.median_ms / 1e3) / 1e9
        assert row.gbytes_per_s == pytest.approx(rate)
        assert row.gflop_per_s == pytest.approx(row.num_operations / row.median_ms / 1e6)


def test_single_operations_are_timed(report: KernelReport) -> None:
    names = [row.name for row in report.operations if row.activations == "f32"]
    assert f"linear q8_0 {VOCAB} x {HIDDEN}, 1 row" in names
    assert f"norm of {HIDDEN}, 256 rows" in names
    assert f"sampling, greedy, 32 rows of {VOCAB}" in names
    shares = {row.name: row.share for row in report.operations}
    assert shares[f"norm of {HIDDEN}, 256 rows"] is None


def test_a_report_is_shown_and_kept(report: KernelReport) -> None:
    out = StringIO()
    show_kernels(report, Console(file=out, width=200))
    for row in report.steps:
        assert row.name in out.getvalue()
    assert "reading memory, all threads" in out.getvalue()
    assert msgspec.json.decode(msgspec.json.encode(report), type=KernelReport) == report


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        measure_kernels(str(tmp_path / "none.gguf"))
