"""A client that has ended its sending side: it may wait for its answers, or be gone.

Decides which; refuses to know what is answered. Both look alike until something is sent: who is
gone answers that with a reset, which is seen in the state of the socket, since nothing is read any
more. Where an answer is under way, its own bytes do it, and while none come, a comment in a stream
of events. Before the answer it is `100 Continue`, which a client of HTTP/1.1 has to take at any
time (RFC 9110, 15.2).

One of HTTP/1.0 must not be sent that. For it TCP itself asks (keep-alive), with segments that carry
nothing. The system of a client that is gone may answer for it as long as it waits for our end, a
minute on Linux (`tcp_fin_timeout`); then it resets the connection, and the request ends here too.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from headrace.server.exchange import KEY, Exchange

LOOK_FIRST_S: Final = 0.02
LOOK_S: Final = 0.25
PROBE_S: Final = 5.0  # between two probes, for whoever leaves later
ASK_FIRST_S: Final = 5  # by TCP, after silence
ASK_S: Final = 5
CAN_LOOK: Final = hasattr(socket, "TCP_INFO")

_INTERIM: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT: Final = b"3\r\n:\n\n\r\n"  # a chunk of its own, between two events
_CLOSED: Final = 7  # TCP_CLOSE: the first byte of struct tcp_info is a state of linux/tcp_states.h


class HalfClosed:
    """Watches one connection until it is closed, and breaks it where its client is gone."""

    def __init__(self, transport: asyncio.Transport, probe: Callable[[], bytes]) -> None:
        """`probe`: what may be sent now beside the answers, if anything."""
        self._transport = transport
        self._probe_bytes = probe
        self._socket: socket.socket = transport.get_extra_info("socket")
        self._loop = asyncio.get_running_loop()
        self._probe_at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._let_tcp_ask()
        self._probe()
        self._wait(LOOK_FIRST_S)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _let_tcp_ask(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASK_FIRST_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_S)

    def _wait(self, delay_s: float) -> None:
        self._timer = self._loop.call_later(delay_s, self._look)

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        if self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSED:
            self._transport.abort()
            return
        if self._loop.time() >= self._probe_at_s:
            self._probe()
        self._wait(LOOK_S)

    def _probe(self) -> None:
        if probe := self._probe_bytes():
            self._probe_at_s = self._loop.time() + PROBE_S
            self._transport.write(probe)


def probe_of(cycle: RequestResponseCycle) -> bytes:
    """What a client takes and passes over, at this point of its request's life."""
    if not cycle.response_started:
        return b"" if cycle.scope["http_version"] == "1.0" else _INTERIM
    exchange = cycle.scope.get(KEY)
    is_stream = isinstance(exchange, Exchange) and exchange.is_stream
    return _COMMENT if is_stream and cycle.chunked_encoding else b""
