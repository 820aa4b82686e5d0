"""Runs a gateway: from a configuration to a server that routes, until it is told to stop."""

import gc
import socket
from collections.abc import Callable

from headrace.cluster.gateway.app import create_gateway_app
from headrace.cluster.gateway.gateway import Gateway
from headrace.core.config.schema import Config
from headrace.server.run import run_server


def run_gateway(
    config: Config,
    *,
    listener: socket.socket,
    on_ready: Callable[[str, dict[str, str]], None],
    on_drain: Callable[[int], None] | None = None,
) -> None:
    """As `run_server`. `on_ready` is told the URL, and those of the engines by name, when requests
    are accepted, be engines up or not.

    ConfigError where addresses or keys are wrong.
    """
    gateway = Gateway(config)

    def ready(url: str) -> None:
        gateway.open()
        # What was imported stays: the collector need not look at it while streams wait.
        gc.collect()
        gc.freeze()
        on_ready(url, {one.name: one.address.url for one in gateway.engines})

    run_server(
        create_gateway_app(gateway),
        config.server,
        listener=listener,
        on_ready=ready,
        on_drain=on_drain,
    )
