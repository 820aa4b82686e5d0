"""`headrace serve`: a model behind the OpenAI API, until it is told to stop."""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

from headrace.cli.logs import start_logging
from headrace.cli.output import (
    Progress,
    print_facts,
    print_json,
    report_note,
    showing_progress,
)
from headrace.cli.report import curl_line, drain_line, serve_facts, serve_figures
from headrace.cli.settings import load_settings
from headrace.cluster.boot import WAIT, BootedCluster, boot_cluster
from headrace.live.boot import Booted, boot
from headrace.live.traffic import TrafficRecorder
from headrace.server.app import create_app
from headrace.server.run import bind, run_server
from headrace.server.service import Door, Service

STDIN = 0


def serve(model: str | None, flags: Any, *, as_json: bool) -> int:
    """Bind, then load while /health already answers, then serve until a signal."""
    started_ns = time.monotonic_ns()
    config = load_settings(flags, model=model).config
    start_logging(config.telemetry.log_level)
    if config.cluster.engines:
        from headrace.cli.gateway import serve_engines

        return serve_engines(config, as_json=as_json)
    is_alone = config.cluster.is_alone and not config.autoscaler.enabled
    listener = bind(config.server.host, config.server.port)
    recorder = TrafficRecorder.of(config.telemetry)
    app = create_app(None, config.server, telemetry=config.telemetry, recorder=recorder)
    booted: list[Booted | BootedCluster] = []

    def load() -> Booted | BootedCluster:
        start = boot if is_alone else boot_cluster
        with showing_progress() as report:
            booted.append(start(config, on_progress=_unless_stopped(report, app.state.service)))
        return booted[0]

    def tell(url: str) -> None:
        figures = serve_figures(booted[0], url, (time.monotonic_ns() - started_ns) / 1e9)
        if as_json:
            print_json(figures)
        else:
            print_facts(serve_facts(figures))
            # Outside the table, which would break the line at the terminal's width.
            print(f"\n{curl_line(figures)}", flush=True)

    def note_drain(num_requests: int) -> None:
        report_note(drain_line(num_requests, config.server.drain_timeout_s))

    if not is_alone:
        _restart_on_hang_up(booted)
    if config.cluster.listen and not (config.cluster.num_workers or config.cluster.on):
        report_note(f"waiting for workers: headrace worker --connect {config.cluster.listen} ...")
    with ExitStack() as ends, suppress(_Stopped):
        ends.callback(lambda: [one.close() for one in booted])
        if recorder is not None:
            ends.callback(recorder.close)  # first of all, while workers still say what they know
        run_server(
            app, config.server, listener=listener, on_ready=tell, on_drain=note_drain, boot=load
        )
    return 0


def _restart_on_hang_up(booted: Sequence[Booted | BootedCluster]) -> None:
    """Take over SIGHUP: the workers of what is booted by then restart, one after another."""
    had_terminal = os.isatty(STDIN)

    def hang_up(*_: object) -> None:
        if had_terminal and not os.isatty(STDIN):
            os.kill(os.getpid(), signal.SIGTERM)  # nobody would see, or end, what goes on
        for one in booted:
            if isinstance(one, BootedCluster):
                one.engine.restart_workers()

    signal.signal(signal.SIGHUP, hang_up)


class _Stopped(Exception):
    """A signal came while the model was fetched or loaded: nobody waits for it any more."""


def _unless_stopped(report: Progress, service: Service) -> Progress:
    def checked(stage: str, done: int, total: int) -> None:
        if service.door is Door.DRAINING:
            raise _Stopped
        service.waits_for = _awaited(done, total) if stage == WAIT else ""
        report(stage, done, total)

    return checked


def _awaited(num_there: int, num_wanted: int) -> str:
    """Of workers, in words. Who waits for any that may come wants one."""
    num_missing = max(1, num_wanted - num_there)
    return "1 worker" if num_missing == 1 else f"{num_missing} workers"
