"""`headrace serve`: a model behind the OpenAI API, until it is told to stop."""

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from typing import Any

from headrace.cli.loading import Loading, Start, Stopped
from headrace.cli.logs import start_logging
from headrace.cli.output import print_facts, print_json, report_note
from headrace.cli.report import curl_line, drain_line, serve_facts, serve_figures
from headrace.cli.settings import load_settings, served
from headrace.core.config.schema import Config
from headrace.live.boot import boot
from headrace.live.traffic import TrafficRecorder
from headrace.server.listener import bind

STDIN = 0


def serve(model: str | None, flags: Any, *, as_json: bool) -> int:
    """Bind, then load while /health already answers, then serve until a signal."""
    started_ns = time.monotonic_ns()
    config = served(load_settings(flags, model=model)).config
    start_logging(config.telemetry.log_level)
    if config.cluster.engines:
        from headrace.cli.gateway import serve_engines

        return serve_engines(config, as_json=as_json)
    listener = bind(config.server.host, config.server.port)
    loading = Loading(_start(config))

    def tell(url: str) -> None:
        started_s = (time.monotonic_ns() - started_ns) / 1e9
        figures = serve_figures(loading.result(), url, started_s)
        if as_json:
            print_json(figures)
        else:
            print_facts(serve_facts(figures))
            # Outside the table, which would break the line at the terminal's width.
            print(f"\n{curl_line(figures)}", flush=True)

    with closing(loading), suppress(Stopped):
        loading.begin()
        _serve(config, listener, loading, tell)
    return 0


def _serve(
    config: Config, listener: socket.socket, loading: Loading, on_ready: Callable[[str], None]
) -> None:
    """What is imported here is imported while the model is loaded."""
    from headrace.server.app import create_app
    from headrace.server.run import run_server

    recorder = TrafficRecorder.of(config.telemetry)
    app = create_app(None, config.server, telemetry=config.telemetry, recorder=recorder)
    loading.service = app.state.service

    def note_drain(num_requests: int) -> None:
        report_note(drain_line(num_requests, config.server.drain_timeout_s))

    if not _is_alone(config):
        _restart_on_hang_up(loading)
    if config.cluster.listen and not (config.cluster.num_workers or config.cluster.on):
        report_note(f"waiting for workers: headrace worker --connect {config.cluster.listen} ...")
    # Recording ends while workers still say what they know.
    with nullcontext() if recorder is None else closing(recorder):
        run_server(
            app,
            config.server,
            listener=listener,
            on_ready=on_ready,
            on_drain=note_drain,
            boot=loading.result,
        )


def _is_alone(config: Config) -> bool:
    return config.cluster.is_alone and not config.autoscaler.enabled


def _start(config: Config) -> Start:
    """How it is booted: in this process, or in several."""
    if _is_alone(config):
        return lambda report, look: boot(config, on_progress=report)
    from headrace.cluster.boot import boot_cluster

    return lambda report, look: boot_cluster(
        config, on_progress=report, on_wait=_note_wait, on_look=look
    )


def _note_wait(text: str) -> None:
    report_note(f"waiting for workers: {text}")


def _restart_on_hang_up(loading: Loading) -> None:
    """Take over SIGHUP: the workers of what is loaded by then restart, one after another."""
    from headrace.cluster.boot import BootedCluster

    had_terminal = os.isatty(STDIN)

    def hang_up(*_: object) -> None:
        if had_terminal and not os.isatty(STDIN):
            os.kill(os.getpid(), signal.SIGTERM)  # nobody would see, or end, what goes on
        booted = loading.loaded()
        if isinstance(booted, BootedCluster):
            booted.engine.restart_workers()

    signal.signal(signal.SIGHUP, hang_up)
