"""A server on a free port of 127.0.0.1, in a thread of the test's process."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from headrace.core.config.schema import ServerConfig
from headrace.core.config.telemetry import TelemetryConfig
from headrace.live.traffic import TrafficRecorder
from headrace.server.app import create_app
from headrace.server.run import HttpServer
from headrace.server.service import Service
from support.leftovers import WATCH, excess_tasks, num_tasks

if TYPE_CHECKING:
    from starlette.applications import Starlette


class RunningServer:
    """Starts on creation; `stop` drains and joins."""

    def __init__(
        self,
        booted: Any,
        *,
        is_attached: bool = True,
        listener: socket.socket | None = None,
        recorder: TrafficRecorder | None = None,
        **settings: Any,
    ) -> None:
        self.booted = booted
        self.config = ServerConfig(port=0, **settings)
        self.app: Starlette = create_app(
            booted if is_attached else None,
            self.config,
            telemetry=TelemetryConfig(),
            recorder=recorder,
        )
        self.server = HttpServer(self.app, self.config, listener=listener)
        self.error: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()
        if not self._ready.wait(10):
            raise TimeoutError("the server did not start")
        self._num_tasks = self.num_tasks()

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def service(self) -> Service:
        return cast("Service", self.app.state.service)

    def num_tasks(self) -> int:
        """Tasks that live in the server's event loop."""
        return num_tasks(self.server.loop)

    def attach(self) -> None:
        """Give the model to a server that runs without one."""
        self.service.attach(self.booted)

    def join(self, timeout_s: float = 20.0) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError("the server did not stop")

    def stop(self) -> None:
        if self._thread.is_alive():
            WATCH.note("a server", lambda: excess_tasks(self.server.loop, self._num_tasks))
        self.server.stop()
        self.join()

    def _run(self) -> None:
        try:
            self.server.run(on_ready=lambda url: self._ready.set())
        except BaseException as error:
            self.error = error
            raise


@contextmanager
def running_server(booted: Any, **settings: Any) -> Iterator[RunningServer]:
    server = RunningServer(booted, **{"drain_timeout_s": 2.0, **settings})
    try:
        yield server
    finally:
        server.stop()
