"""A server of one's own ends with whoever started it, and says why it did not begin."""

import os
import signal
from pathlib import Path

import pytest

from headrace.bench.server import arguments_of, ending_well, not_started
from headrace.core.base.errors import ConfigError, HeadraceError


def test_arguments_are_cut_as_a_shell_does() -> None:
    assert arguments_of("--workers 3 --model 'a b'") == ["--workers", "3", "--model", "a b"]
    with pytest.raises(ConfigError, match="no closing quotation"):
        arguments_of("--model 'a")


def test_the_servers_own_word_is_told(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("warning: slow\nerror: unknown option: --nonsense\n")
    refused = not_started(2, 1.0, log)
    assert isinstance(refused, ConfigError)
    assert "server did not start: unknown option: --nonsense" in str(refused)
    for code in (None, 1):
        failed = not_started(code, 1.0, log)
        assert isinstance(failed, HeadraceError)
        assert not isinstance(failed, ConfigError)


def test_a_signal_ends_by_an_exception() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, ending_well():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before
