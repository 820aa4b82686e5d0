"""A worker that does not read is let go before what waits for it fills the memory."""

import socket

import pytest

from headrace.cluster import line as lines
from headrace.cluster.line import Line
from headrace.cluster.wire import Dismiss
from headrace.core.base.errors import TransferError

SECRET = b"sixteen letters!"
WORD = Dismiss("x" * 400)


def test_what_a_worker_has_not_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_UNSENT_BYTES", 1 << 16)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
        line = Line(ours, SECRET)

        def say(num: int) -> None:
            for _ in range(num):
                line.send(WORD)

        say(100)  # which wait for it
        assert line.has_unsent
        with pytest.raises(TransferError, match=r"the worker has left 65\d{3} bytes unread"):
            say(1000)
