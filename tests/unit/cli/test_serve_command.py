"""`headrace serve` in this process, with a boot that we hold in our hands."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.core.base.errors import ConfigError

Capture = pytest.CaptureFixture[str]
Report = Callable[[str, int, int], None]
TIMEOUT_S = 10.0


def serve(monkeypatch: pytest.MonkeyPatch, boot: Callable[..., Any]) -> int:
    monkeypatch.setattr("headrace.cli.serve.boot", boot)
    return main(["serve", "model.gguf", "--port", "0"])


def test_a_signal_while_the_model_loads_gives_the_loading_up(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    reported = 0

    def boot(config: object, *, on_progress: Report) -> None:
        nonlocal reported
        pause = threading.Event()
        while not callable(signal.getsignal(signal.SIGTERM)):
            pause.wait(0.001)  # until the server listens for signals
        os.kill(os.getpid(), signal.SIGTERM)
        for done in range(int(TIMEOUT_S / 0.01)):
            on_progress("fetch", done, 1 << 20)
            reported += 1
            pause.wait(0.01)
        raise AssertionError("nobody stopped the loading")

    assert serve(monkeypatch, boot) == 0
    assert reported < TIMEOUT_S / 0.01
    out, err = capsys.readouterr()
    assert out == ""
    assert err in ("", "fetching the model (1.00 MiB)\n")


def test_a_model_that_cannot_be_booted(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def boot(config: object, *, on_progress: Report) -> None:
        raise ConfigError("the model is wrong", hint="take another")

    assert serve(monkeypatch, boot) == 2
    assert capsys.readouterr() == ("", "error: the model is wrong\nhint: take another\n")
