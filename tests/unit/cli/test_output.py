"""Errors, progress and tables as text."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from headrace.cli.main import main
from headrace.cli.output import (
    print_facts,
    report_error,
    report_note,
    rewrite_line,
    showing_progress,
)
from headrace.cli.report import (
    curl_line,
    drain_line,
    kv_facts,
    kv_figures,
    memory_facts,
    memory_figures,
    serve_facts,
)
from headrace.core.config.ledger import ByteLedger, plan_kv

Capture = pytest.CaptureFixture[str]

LEDGER = ByteLedger(weights=100 << 20, activations=10 << 20, available=1000 << 20)
KV = plan_kv(
    LEDGER,
    asked_bytes=64 << 20,
    block_bytes=1 << 18,
    block_size=16,
    max_model_len=2048,
    max_running_seqs=8,
    step_tokens=512,
)
FIGURES = {
    "url": "http://127.0.0.1:8000",
    "model": {
        "name": "tiny",
        "architecture": "llama",
        "num_parameters": 134_515_008,
        "weight_types": "q4_1 + q8_0",
        "file_bytes": 98_362_432,
        "max_model_len_tokens": 2048,
        "has_chat_template": True,
    },
    "device": {
        "backend": "native",
        "isa": "avx2",
        "num_threads": 2,
        "activations": "f32",
        "attention": "f32",
    },
    "memory": memory_figures(KV.ledger),
    "kv": kv_figures(KV, "int8"),
    "num_workers": 1,
    "started_s": 0.94,
}


def test_an_error_of_many_lines(capsys: Capture) -> None:
    report_error("2 settings are wrong\nfirst\nsecond\nhint: read")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: 2 settings are wrong\n  - first\n  - second\nhint: read\n"


def test_errors_are_not_wrapped_and_not_read_as_markup(capsys: Capture) -> None:
    text = "[bold]x[/bold] " + "word " * 100
    report_error(text)
    assert capsys.readouterr().err == f"error: {text}\n"


def test_progress_of_a_fetch_is_one_line_where_nobody_watches(capsys: Capture) -> None:
    with showing_progress() as report:
        for done in range(3):
            report("fetch", done, 2 << 20)
        report("load", 1, 2)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "fetching the model (2.00 MiB)\n")


def test_progress_on_a_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with showing_progress() as report:
        report("fetch", 1 << 20, 2 << 20)
        report("load", 2, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert "fetching the model" in err
    assert "loading the model" in err


def test_the_ledger_in_words_adds_up() -> None:
    facts = memory_facts(memory_figures(KV.ledger))
    assert list(facts) == ["weights", "activations", "KV pool", "total"]
    assert facts["KV pool"].strip() == "64.0 MiB"
    assert facts["total"].split() == ["174", "MiB", "17%", "of", "1000", "MiB", "available"]


def test_what_fits_is_told_for_usual_and_for_longest_requests() -> None:
    assert kv_figures(KV, "int8")["num_seqs_by_num_tokens"] == {"512": 8, "2048": 2}


def test_the_table_at_the_start(capsys: Capture) -> None:
    print_facts(serve_facts(FIGURES))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    for words in (
        "llama, 135M parameters, q4_1 + q8_0",
        "native, avx2, f32 activations, f32 attention, 2 threads",
        "4096 tokens in 256 int8 blocks: 8 requests of 512, or 2 requests of 2048",
        "http://127.0.0.1:8000/v1  (ready after 0.9 s, Ctrl-C drains and stops)",
    ):
        assert words in out


def test_one_thread_is_one_thread() -> None:
    device = {**FIGURES["device"], "num_threads": 1}  # type: ignore[dict-item]
    assert serve_facts({**FIGURES, "device": device})["device"]["backend"].endswith(", 1 thread")


def test_one_request_that_fits_is_one_request() -> None:
    fits = kv_facts({**kv_figures(KV, "int8"), "num_seqs_by_num_tokens": {"512": 8, "8192": 1}})
    assert fits["fits"].endswith("8 requests of 512, or 1 request of 8192")


def test_the_torch_backend_has_no_instruction_set() -> None:
    device = {"backend": "torch", "isa": "auto", "num_threads": 2, "activations": "auto"}
    assert serve_facts({**FIGURES, "device": device})["device"]["backend"] == "torch, 2 threads"


def test_a_drain_says_whom_it_waits_for_and_how_not_to() -> None:
    line = "draining 3 requests (up to 30 s); press Ctrl-C again to stop now"
    assert drain_line(3, 30.0) == line
    assert drain_line(1, 2.5) == line.replace("3 requests", "1 request").replace("30 s", "2.5 s")


def test_the_curl_line_is_one_shell_command() -> None:
    import json
    import shlex

    model = {**FIGURES["model"], "name": "o'brien"}  # type: ignore[dict-item]
    words = shlex.split(curl_line({**FIGURES, "model": model}))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(words[-1])
    assert body["model"] == "o'brien"
    assert body["messages"][0]["role"] == "user"
    plain = {**FIGURES["model"], "has_chat_template": False}  # type: ignore[dict-item]
    words = shlex.split(curl_line({**FIGURES, "model": plain}))
    assert words[1].endswith("/v1/completions")
    assert "prompt" in json.loads(words[-1])


# ---- a standard error that takes nothing


def _full_disk() -> TextIO:
    return Path("/dev/full").open("w")


def _left_reader() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def _closed() -> TextIO:
    stream = Path(os.devnull).open("w")  # noqa: SIM115
    stream.close()
    return stream


@pytest.fixture(params=[_full_disk, _left_reader, _closed])
def unwritable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    """Closing it fails too where anything is left in its buffer."""
    stream = request.param()
    monkeypatch.setattr(sys, "stderr", stream)
    yield stream
    stream.close()


@pytest.mark.usefixtures("unwritable")
def test_what_cannot_be_told_is_lost() -> None:
    for _ in range(3):
        report_note("goes on")
        report_error("has failed\nhint: look")
        rewrite_line("1 of 2")
    with showing_progress() as report:
        report("fetch", 1, 2)


@pytest.mark.usefixtures("unwritable")
def test_an_answer_does_not_depend_on_who_hears_its_notes(capsys: Capture) -> None:
    assert main(["plan", "roofline", "--preset", "reference-70b-h100"]) == 0
    assert "ridge" in capsys.readouterr().out


@pytest.mark.usefixtures("unwritable")
def test_a_wrong_command_has_its_code_whoever_hears_the_error() -> None:
    assert main(["plan", "roofline", "--preset", "none-such"]) == 2
