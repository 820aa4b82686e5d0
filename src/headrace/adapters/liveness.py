"""Streams whose other end may be gone without a word: its machine is off, or cut off."""

import socket
from contextlib import suppress
from typing import Final

DEAD_AFTER_MS: Final = 15_000  # of what is sent and not acknowledged, or silence on the wire


def notice_death(stream: socket.socket) -> None:
    """Of a machine that can no longer say that it is gone; where the system has these options."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_USER_TIMEOUT", DEAD_AFTER_MS),
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 2),
    ):
        number = getattr(socket, option, None)
        if number is not None:
            with suppress(OSError):
                stream.setsockopt(socket.IPPROTO_TCP, number, value)
