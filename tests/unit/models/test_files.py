"""Only files with an end are read, and no more of them than is expected."""

import os
from pathlib import Path

import pytest

from headrace.cli.settings import load_settings
from headrace.core.base.errors import ConfigError
from headrace.live.event_log import EventLogReader
from headrace.live.replay import replay
from headrace.models.files import check_writable, open_regular, read_bounded, read_text
from headrace.models.load import load_model
from support.model_files import RecordingBackend
from support.tiny_model import write_tiny_model


@pytest.fixture(params=["device", "pipe", "folder", "absent"])
def no_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "x"
    match request.param:
        case "device":
            return Path("/dev/zero")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
    return path


def test_what_has_no_end_is_refused_at_once(no_file: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{no_file}: cannot be read: "):
        open_regular(no_file)


def test_so_is_each_file_that_an_operator_names(no_file: Path, tmp_path: Path) -> None:
    """Settings, a chat template, a model, an event log."""
    with pytest.raises(ConfigError, match=f"settings file {no_file}: cannot be read: "):
        load_settings(environ={"HEADRACE_CONFIG": str(no_file)})
    model = write_tiny_model(tmp_path / "tiny.gguf")
    with pytest.raises(ConfigError, match=f"^{no_file}: cannot be read: "):
        load_model(model, RecordingBackend(), chat_template=no_file)
    with pytest.raises(ConfigError, match=str(no_file)):
        load_model(no_file, RecordingBackend())
    with pytest.raises(ConfigError, match=f"^{no_file}: cannot be read: "):
        replay(no_file)


def test_no_more_is_read_than_is_expected(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345\xff")
    assert read_bounded(path, 6) == b"12345\xff"
    with pytest.raises(ConfigError, match=f"^{path}: larger than 5$"):
        read_bounded(path, 5)
    with pytest.raises(ConfigError, match=f"^{path}: not UTF-8 text$"):
        read_text(path, 6)


def test_a_damaged_log_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="not an event log"):
        EventLogReader(path)


def test_what_is_to_be_written_can_be_and_is_not_there_yet(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "none")
    (tmp_path / "kept").write_text("as it was")
    for name in ("new", "link", "kept"):
        check_writable(tmp_path / name)
    assert {one.name for one in tmp_path.iterdir()} == {"link", "kept"}
    assert (tmp_path / "kept").read_text() == "as it was"
    os.mkfifo(tmp_path / "pipe")
    for name in (".", "pipe", "no/file"):
        with pytest.raises(ConfigError, match="cannot be written"):
            check_writable(tmp_path / name)
