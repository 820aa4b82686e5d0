"""A line of the log is one line."""

import logging

import pytest

from headrace.cli.logs import start_logging


@pytest.fixture(autouse=True)
def _as_it_was() -> object:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], _ = before
    root.setLevel(before[1])
    logging.captureWarnings(False)
    logging.getLogger("headrace.fleet").setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("level", "shown"),
    [("debug", True), ("info", True), ("warning", True), ("error", False)],
)
def test_what_becomes_of_workers_is_shown_by_default(
    level: str, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    start_logging(level)
    logging.getLogger("headrace.fleet").info("worker w0 is back")
    logging.getLogger("headrace.access").info("a request")
    said = capsys.readouterr().err
    assert ("INFO headrace.fleet worker w0 is back" in said) == shown
    assert ("a request" in said) == (level in ("debug", "info"))


def test_nobody_writes_lines_of_his_own_into_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging("info")
    log = logging.getLogger("headrace.test")
    log.info("worker %s", "w0\n2026-01-01 CRITICAL root all is lost\x1b[2J")
    log.warning("long %s", "x" * 100_000)
    try:
        raise ValueError("\x1b[31mred")
    except ValueError:
        log.exception("a fault")
    lines = capsys.readouterr().err.splitlines()
    assert all(line.isprintable() for line in lines)
    assert lines[0].endswith("worker w0\\n2026-01-01 CRITICAL root all is lost\\x1b[2J")
    assert len(lines[1]) == 8192
    assert lines[1].endswith(" characters)")
    assert lines[3].startswith("Traceback")
    assert lines[-1] == "ValueError: \\x1b[31mred"
