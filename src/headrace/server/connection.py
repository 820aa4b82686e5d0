"""An HTTP connection as uvicorn keeps it, with the limits that uvicorn leaves to a proxy.

What uvicorn gives: bodies are read only as fast as the application takes them, writing stops at 64
KiB unsent, and an idle connection is closed after the keep-alive time. What is added here:

- a request line and headers may be 32 KiB together (431);
- they must arrive within 10 s, also when they come byte by byte (the connection is closed);
- pipelined requests wait in a queue, whose last answer closes the connection (`connection: close`)
  where it was full, or a body too long to wait; a client that leaves is noticed by all of them;
- a request that is refused lets those before it have their answers first;
- a body in chunks is not encoded any further (501), which the parser would pass over;
- fields behind a body (trailers) are dropped: who is before us may have looked at headers alone;
- an upgrade that is offered (HTTP/2, by Java's client with each first request) is passed over, and
  the request answered as if it were not; uvicorn would take its body for the next request;
- a client may send on no more than 16 MiB after its answer is complete;
- a client that ends its sending side has its answers, unless it turns out to be gone
  (`half_closed.py`);
- one of HTTP/1.0 is sent no chunks (`plain_body.py`);
- the application may break the connection at once (`headrace.abort`), which closing it cannot where
  bytes are unsent.

And left out is what nobody here asks for: uvicorn's logs, and a connection's own address. Many
clients make a connection for each request, and what runs so seldom is in no cache of the processor,
where it takes ten times as long.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from headrace.core.config.units import size_text
from headrace.server.errors import ErrorObject, Failure
from headrace.server.exchange import ABORT, PIPE, WHOLE
from headrace.server.half_closed import CAN_LOOK, HalfClosed, probe_of
from headrace.server.plain_body import without_chunks

MAX_HEAD_BYTES = 32 << 10
HEAD_TIMEOUT_S = 10.0
MAX_PIPELINED = 32
MAX_QUEUED_BODY_BYTES = 64 << 10  # of one that waits: who is not read from is not seen to leave
MAX_UNREAD_BODY_BYTES = 16 << 20

_HEAD_TOO_LARGE = Failure(
    431,
    ErrorObject(
        f"request line and headers are larger than {size_text(MAX_HEAD_BYTES)}",
        "invalid_request_error",
        None,
        "headers_too_large",
    ),
)


def _unknown_coding(value: bytes) -> Failure:
    said = value[:60].decode("latin-1")
    return Failure(
        501,
        ErrorObject(
            f"a body of transfer-encoding {said!r} is not taken: send it chunked, and not encoded"
            " any further, or with its content-length",
            "invalid_request_error",
            None,
            "unsupported_transfer_coding",
        ),
    )


class Connection(HttpToolsProtocol):
    """One connection. All methods run on the event loop."""

    head_timeout_s = HEAD_TIMEOUT_S

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        # All that uvicorn's own constructor sets, without its call: see above.
        self.config = config
        self.app = config.loaded_app
        self.loop = _loop or asyncio.get_running_loop()
        self.logger, self.access_logger, self.access_log = _uvicorn_log, _uvicorn_log, False
        self.ws_protocol_class = config.ws_protocol_class
        self.root_path, self.asgi_version = config.root_path, config.asgi_version
        self.limit_concurrency = config.limit_concurrency
        self.app_state = app_state
        self.timeout_keep_alive_task = None
        self.timeout_keep_alive = config.timeout_keep_alive
        self.server_state = server_state
        self.connections, self.tasks = server_state.connections, server_state.tasks
        self.transport = self.flow = None  # type: ignore[assignment]
        self.server = self.client = self.scheme = None
        self.pipeline = deque()
        self.url = b""
        self.scope = self.headers = self.cycle = None  # type: ignore[assignment]
        self.expect_100_continue = False
        self._begin_parsing()
        self._num_head_bytes = 0
        self._num_unread_bytes = 0
        self._is_refused = False
        self._has_head = False  # of the request that comes
        self._head_timer: asyncio.TimerHandle | None = None
        self._under_way: list[RequestResponseCycle] = []
        self._half_closed: HalfClosed | None = None
        self.on_room: Callable[[], None] | None = None  # of the answer that is sent now

    def _begin_parsing(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        with suppress(AttributeError):  # as in uvicorn
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    # ---- the transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.connections.add(self)
        self.transport = transport  # type: ignore[assignment]
        self.flow = FlowControl(self.transport)
        peer = transport.get_extra_info("peername")
        self.client = peer[:2] if isinstance(peer, tuple) else None
        self.scheme = "http"
        self._expect_head()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: while whole requests wait for their answers."""
        if self._half_closed is None and CAN_LOOK and self._close_after_answers():
            self._half_closed = HalfClosed(self.transport, self._probe)
        return self._half_closed is not None

    def _probe(self) -> bytes:
        waiting = next((one for one in self._under_way if not one.response_complete), None)
        return b"" if waiting is None else probe_of(waiting)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head_timer()
        if self._half_closed is not None:
            self._half_closed.stop()
        super().connection_lost(exc)
        # uvicorn tells only the latest request; one that still runs before pipelined ones must know
        # as well.
        for cycle in self._under_way:
            if not cycle.response_complete:
                cycle.disconnected = True
            cycle.message_event.set()
        self._under_way.clear()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as end:
                # The parser has ended with the head, since it expects another protocol. One that
                # has the head without the offer goes on.
                data = self._head_without_offer() + data[end.args[0] :]
                self._begin_parsing()
            else:
                return

    def _head_without_offer(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT" or self._is_refused:
            raise httptools.HttpParserError("a way to somewhere else")
        lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                words = [word.strip() for word in value.split(b",")]
                value = b", ".join(word for word in words if word.lower() not in _OFFERS)
            if name not in _OFFERS:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join((*lines, b"", b""))

    def _break(self) -> None:
        """No answer here will be whole, and nobody need be told: whoever does this has said why."""
        for cycle in self._under_way:
            cycle.disconnected |= not cycle.response_complete
        self.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.on_room is not None:
            self.on_room()

    def send_400_response(self, msg: str) -> None:
        # Our own refusal makes the parser fail; it has been answered.
        if not self._is_refused:
            self._refuse(
                Failure(400, ErrorObject(msg.lower().rstrip("."), "invalid_request_error"))
            )

    # ---- the parser's calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_head_bytes, self._has_head = 0, False
        if self._head_timer is not None and self._head_timer.when() > self._head_limit_s():
            self._expect_head()  # it is idle no more
        self.scope["extensions"] = {ABORT: self._break}  # type: ignore[dict-item]

    def on_url(self, url: bytes) -> None:
        if self._take_head(len(url)):
            self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._take_head(len(name) + len(value)) or self._has_head:
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            self._refuse(_unknown_coding(value))
            return
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._is_refused or self.parser.should_upgrade():
            return
        self._has_head = True
        self._forget_head_timer()
        if len(self.pipeline) >= MAX_PIPELINED:
            self._close_after_answers()
            return
        super().on_headers_complete()
        cycle = self.cycle
        self.scope["extensions"][PIPE] = ConnectionPipe(self)  # type: ignore[assignment]
        self.scope["extensions"][WHOLE] = lambda: not cycle.more_body  # type: ignore[assignment]
        self._under_way = [one for one in self._under_way if not one.response_complete]
        self._under_way.append(self.cycle)
        if self.pipeline:
            # Only a connection that is read from tells when the client leaves.
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = without_chunks(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        if self._is_refused:
            return
        is_queued = bool(self.pipeline) and self.pipeline[0][0] is self.cycle
        if is_queued and len(self.cycle.body) + len(body) > MAX_QUEUED_BODY_BYTES:
            self._close_after_answers()
            return
        if self.cycle.response_complete:
            self._num_unread_bytes += len(body)
            if self._num_unread_bytes > MAX_UNREAD_BODY_BYTES:
                self._is_refused = True
                self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not (self._is_refused or self.parser.should_upgrade()):
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self.on_room = None
        super().on_response_complete()
        if not (self.transport.is_closing() or self.pipeline):
            # The next one may have begun meanwhile.
            self._expect_head(idle_s=self.timeout_keep_alive if self._has_head else 0.0)

    # ---- limits

    def _take_head(self, num_bytes: int) -> bool:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(_HEAD_TOO_LARGE)
        return not self._is_refused

    def _refuse(self, failure: Failure) -> None:
        if self._is_refused or self._close_after_answers():
            return
        body = failure.body()
        head = (
            f"HTTP/1.1 {failure.status} {_REASONS[failure.status]}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _close_after_answers(self) -> bool:
        """Take nothing more. Whether whole requests are under way, of which the last closes the
        connection.
        """
        self._is_refused = True
        if self.pipeline and self.pipeline[0][0].more_body:
            self.pipeline.popleft()  # its rest will not come
        whole = [one for one in self._under_way if not (one.response_complete or one.more_body)]
        if whole:
            whole[-1].keep_alive = False
        return bool(whole)

    def _head_limit_s(self) -> float:
        return self.loop.time() + self.head_timeout_s

    def _expect_head(self, *, idle_s: float = 0.0) -> None:
        self._forget_head_timer()
        self._head_timer = self.loop.call_at(self._head_limit_s() + idle_s, self._on_head_timeout)

    def _forget_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        self._is_refused = True
        self.transport.abort()


class ConnectionPipe:
    """See `exchange.Pipe`: of the request whose head has just come."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._cycle = connection.cycle

    @property
    def is_open(self) -> bool:
        cycle = self._cycle
        return bool(
            cycle.response_started and cycle.chunked_encoding and not cycle.response_complete
        )

    @property
    def on_room(self) -> Callable[[], None] | None:
        return self._connection.on_room

    @on_room.setter
    def on_room(self, call: Callable[[], None] | None) -> None:
        self._connection.on_room = call

    def write(self, body: bytes) -> bool:
        connection = self._connection
        if not self._cycle.disconnected:
            connection.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return not connection.flow.write_paused


_uvicorn_log = logging.getLogger("uvicorn.error")
_OFFERS = (b"upgrade", b"http2-settings")
_REASONS = {
    400: "Bad Request",
    431: "Request Header Fields Too Large",
    501: "Not Implemented",
}
