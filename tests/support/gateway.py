"""A gateway on a free port of 127.0.0.1, in a thread of the test's process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headrace.cluster.gateway.app import create_gateway_app
from headrace.cluster.gateway.gateway import Gateway
from headrace.core.config.merge import from_settings
from headrace.server.run import HttpServer
from support.leftovers import WATCH, excess_tasks, num_tasks
from support.raw_http import eventually

SETTINGS: dict[str, Any] = {
    "port": 0,
    "engine_poll_s": 0.05,
    "drain_timeout_s": 2.0,
    "worker_wait_s": 0.2,
    "breaker_failures": 1000,
    "policy": "round_robin",
}


class RunningGateway:
    """Starts on creation; `stop` drains and joins."""

    def __init__(self, *engines: str, **settings: Any) -> None:
        self.config = from_settings({**SETTINGS, "engines": list(engines), **settings})
        self.gateway = Gateway(self.config)
        self.server = HttpServer(create_gateway_app(self.gateway), self.config.server)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._thread.start()
        if not self._ready.wait(10):
            raise TimeoutError("the gateway did not start")
        self._num_tasks = num_tasks(self.server.loop)

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def is_up(self, name: str) -> bool:
        return next(one.is_up for one in self.gateway.engines if one.name == name)

    def stop(self, *, is_busy: bool = False) -> None:
        if self._thread.is_alive() and not is_busy:
            WATCH.note("a gateway", lambda: excess_tasks(self.server.loop, self._num_tasks))
        self.server.stop()
        self._thread.join(20)
        if self._thread.is_alive():
            raise TimeoutError("the gateway did not stop")

    def _run(self) -> None:
        def ready(url: str) -> None:
            self.gateway.open()
            self._ready.set()

        self.server.run(on_ready=ready)


@contextmanager
def running_gateway(
    *engines: str, waits_for: int | None = None, **settings: Any
) -> Iterator[RunningGateway]:
    """`waits_for` so many engines to be up; None = all."""
    running = RunningGateway(*engines, **settings)
    wanted = len(engines) if waits_for is None else waits_for
    try:
        eventually(lambda: sum(one.is_up for one in running.gateway.engines) >= wanted)
        yield running
        # Whatever happened, nothing is left of it.
        eventually(lambda: running.gateway.num_deliveries == 0)
        assert not any(one.calls for one in running.gateway.engines)
        running.gateway.switch.router.check()
        assert running.gateway.switch.router.stats().num_in_flight == 0
    finally:
        running.stop()
