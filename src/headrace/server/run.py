"""Runs the application: binds, serves, and stops so that nobody is cut off who can be helped.

SIGTERM or SIGINT closes the door at once (`/ready` 503, new requests 503 with Retry-After); answers
under way finish within the drain time, those that do not end with an error. A second signal ends
that time: they end with the error now. A third one cuts off who does not read it; later ones change
nothing. Whenever it comes, the process ends as it would have.
"""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Protocol, runtime_checkable

import uvicorn
from starlette.applications import Starlette

from headrace.core.config.schema import ServerConfig
from headrace.server.connection import Connection
from headrace.server.listener import BACKLOG, bind, url_of
from headrace.server.service import Answerer, Service

KEEP_ALIVE_S = 75  # longer than most proxies keep an idle connection, so that they close it first
NOTE_AFTER_S = 0.1  # a drain that is shorter is not worth a word
LAST_WORDS_S = 2  # for errors that end answers to leave

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_server(
    app: Starlette,
    config: ServerConfig,
    *,
    listener: socket.socket | None = None,
    on_ready: Callable[[str], None] | None = None,
    on_drain: Callable[[int], None] | None = None,
    boot: Callable[[], Answerer] | None = None,
) -> None:
    """Serve until told to stop, and return when all is sent. ConfigError where the port cannot be
    had.

    `listener` is a socket from `bind`, which this takes over; None binds config.host and
    config.port. `on_ready` is told the URL when requests are accepted; `on_drain` is told how many
    answers a drain waits for, unless it is over at once. `boot` loads the model while the server
    already answers `/health` and `/ready`; what it raises is raised here.

    In the main thread it takes over SIGTERM and SIGINT for good: one that comes while the rest of
    the process is closed must not end it halfway.
    """
    server = HttpServer(app, config, listener=listener, on_drain=on_drain)
    is_main = threading.current_thread() is threading.main_thread()
    signals = _SIGNALS if is_main else ()
    for number in signals:
        signal.signal(number, lambda *_: server.stop())
    try:
        server.run(on_ready=on_ready, boot=boot)
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)


@runtime_checkable
class Drainable(Protocol):
    """What an application has at `app.state.service`: what must be known of it to stop it well."""

    @property
    def num_deliveries(self) -> int:
        """Answers under way."""
        ...

    def begin_drain(self) -> None:
        """Let nobody in."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Let nobody in, wait for the answers under way, then end those that are left. Returns
        whether all could finish.
        """
        ...

    def close(self) -> None: ...


class HttpServer:
    """One server on one listening socket; runs once."""

    def __init__(
        self,
        app: Starlette,
        config: ServerConfig,
        *,
        listener: socket.socket | None = None,
        on_drain: Callable[[int], None] | None = None,
    ) -> None:
        service = app.state.service
        if not isinstance(service, Drainable):
            raise TypeError("the application cannot be drained")
        self._service = service
        self._drain_timeout_s = config.drain_timeout_s
        self._on_drain = on_drain
        self._listener = bind(config.host, config.port) if listener is None else listener
        self.url = url_of(self._listener)
        self._server = _Uvicorn(app)
        self._is_stopped_early = False
        self.loop: asyncio.AbstractEventLoop | None = None  # while it runs, and after
        self._draining: asyncio.Task[None] | None = None
        self._num_stops = 0

    @property
    def connections(self) -> Collection[asyncio.Protocol]:
        """Open connections, idle ones included."""
        return self._server.server_state.connections

    def run(
        self,
        *,
        on_ready: Callable[[str], None] | None = None,
        boot: Callable[[], Answerer] | None = None,
    ) -> None:
        """Block until stopped."""
        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            runner.run(self._serve(on_ready, boot))

    def stop(self) -> None:
        """Drain, then stop; called again, drain no longer; and again, cut all off. From any
        thread.
        """
        if self.loop is None:
            self._is_stopped_early = True
            return
        with contextlib.suppress(RuntimeError):  # it has stopped
            self.loop.call_soon_threadsafe(self._on_stop)

    async def _serve(
        self, on_ready: Callable[[str], None] | None, boot: Callable[[], Answerer] | None
    ) -> None:
        self.loop = asyncio.get_running_loop()
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        if self._is_stopped_early:
            self._on_stop()
        try:
            if boot is not None:
                assert isinstance(self._service, Service)  # nobody else can be given a model
                self._service.attach(await asyncio.to_thread(boot))
            if on_ready is not None:
                on_ready(self.url)
            await serving
        finally:
            self._server.should_exit = True
            await asyncio.wait([serving])
            if self._draining is not None:
                self._draining.cancel()
            self._service.close()

    def _on_stop(self) -> None:
        self._num_stops += 1
        match self._num_stops:
            case 1:
                self._service.begin_drain()
                self._draining = asyncio.create_task(self._drain(self._drain_timeout_s))
            case 2:
                assert self._draining is not None
                self._draining.cancel()
                self._draining = asyncio.create_task(self._drain(0.0))
            case _:
                self._server.force_exit = self._server.should_exit = True
                self._server.abort_connections()

    async def _drain(self, timeout_s: float) -> None:
        note = asyncio.get_running_loop().call_later(NOTE_AFTER_S, self._note_drain)
        try:
            await self._service.drain(timeout_s)
        finally:
            note.cancel()
        self._server.should_exit = True

    def _note_drain(self) -> None:
        if self._on_drain is not None and self._service.num_deliveries:
            self._on_drain(self._service.num_deliveries)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signals and logs."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=LAST_WORDS_S,
                backlog=BACKLOG,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        # Those that do not read their last words.
        self.abort_connections()

    def abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()
