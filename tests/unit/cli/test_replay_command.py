"""`headrace replay` and `headrace pull`."""

import json
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import Ns
from headrace.core.config.schema import WorkerConfig
from headrace.live.engine import LiveEngine
from headrace.live.event_log import EventLogReader, EventLogWriter, is_json
from headrace.live.generate import GenerateRequest, TextEngine
from support.fake_engine import VOCAB_SIZE, FormulaExecutor, byte_tokenizer

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The log of an engine that has answered one request."""
    path = tmp_path / "events.log"
    engine = LiveEngine(WorkerConfig(), FormulaExecutor(), event_log=path)
    texts = TextEngine(engine, byte_tokenizer(), max_model_len=2048, vocab_size=VOCAB_SIZE)
    request = GenerateRequest(
        request_id="r",
        prompt_tokens=tuple(b"hello"),
        params=SamplingParams(max_tokens=4),
        arrived_ns=Ns(0),
    )
    assert list(texts.stream_sync(request))[-1].finish is not None
    engine.close()
    return path


def change_an_effect(source: Path, target: Path) -> None:
    """The log as it would be, had the first event had no effect."""
    with EventLogReader(source) as log:
        writer = EventLogWriter(target, log.header)
        for index, frame in enumerate(log):
            writer.write(frame.now, frame.event, frame.effects if index else ())
        writer.close()


def test_a_log_replays_as_recorded(log: Path, capsys: Capture) -> None:
    assert main(["replay", str(log), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_equal"] is True
    assert report["difference"] is None
    assert report["num_events"] >= 5
    assert main(["replay", str(log)]) == 0
    assert capsys.readouterr().out == f"{report['num_events']} events, every effect as recorded\n"


def test_a_difference_is_exit_code_1(log: Path, tmp_path: Path, capsys: Capture) -> None:
    changed = tmp_path / "changed.log"
    change_an_effect(log, changed)
    assert main(["replay", str(changed)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: an effect is not as recorded\n  - event 0 (Arrive at ")
    assert main(["replay", str(changed), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["difference"]["event_index"] == 0


def test_a_cut_log_is_told(log: Path, capsys: Capture) -> None:
    log.write_bytes(log.read_bytes()[:-3])
    assert main(["replay", str(log)]) == 0
    assert capsys.readouterr().out.endswith("; the log's last frame is cut\n")


def test_a_file_that_is_no_log(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "x").write_bytes(b"\x01\0\0\0x")
    assert main(["replay", str(tmp_path / "x")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: not an event log")
    assert err.count("\n") == 1


def test_a_recording_is_no_event_log(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "x").write_text('{"kind": "begin"}\n')
    assert main(["replay", str(tmp_path / "x")]) == 2
    assert "x\nhint: `serve --event-log`" in capsys.readouterr().err


def test_a_text_of_any_kind_is_no_event_log(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "x").write_text("from headrace import LLM\n")
    assert main(["replay", str(tmp_path / "x")]) == 2
    told, hint = capsys.readouterr().err.splitlines()
    assert told == f"error: not an event log: {tmp_path / 'x'}"
    assert hint.startswith("hint: `serve --event-log`")


def test_a_length_may_look_like_a_brace() -> None:
    assert is_json(b'{"ki')
    assert is_json(b"{}\n")
    assert not is_json((0x017B).to_bytes(4, "little"))
    assert not is_json(b"")


def test_pull_prints_where_a_model_lies(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a").write_bytes(b"123")
    (folder / "b").write_bytes(b"45")
    assert main(["pull", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert main(["pull", str(folder), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures == {"path": str(folder), "num_files": 2, "size_bytes": 5}
