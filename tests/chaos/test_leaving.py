"""Workers that are asked to leave, and come back: whoever reads a stream notices nothing."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from chaos.test_workers import (
    Answer,
    all_up,
    answers,
    pids,
    requests,
    tiny_config,
    undisturbed,
    wait_until,
)
from headrace.cluster.boot import BootedCluster, boot_cluster
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import Config, ServerConfig
from headrace.live.generate import GenerateRequest

pytest.importorskip("headrace.ops.native._native")
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return tiny_config(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def asked() -> list[GenerateRequest]:
    return requests(8)


@pytest.fixture(scope="module")
def wanted(config: Config, asked: list[GenerateRequest]) -> list[Answer]:
    return undisturbed(config, asked)


@pytest.fixture
def start() -> Iterator[Callable[[Config], BootedCluster]]:
    booted: list[BootedCluster] = []

    def started(config: Config) -> BootedCluster:
        booted.append(boot_cluster(config))
        return booted[0]

    yield started
    for one in booted:
        one.close()


def num_starts(cluster: BootedCluster) -> list[int]:
    return [worker.num_starts for worker in cluster.engine.workers()]


def stream_over_a_rolling_restart(
    cluster: BootedCluster, asked: list[GenerateRequest], wanted: list[Answer]
) -> None:
    """Until all have come back; at least one stream in each moment of it."""
    before = pids(cluster)
    strike: Callable[[], None] | None = cluster.engine.restart_workers
    while num_starts(cluster) != [2, 2] or not all_up(cluster):
        assert answers(cluster.text_engine, asked, strike=strike) == wanted
        strike = None
    assert not set(before) & set(pids(cluster))
    for pid in before:
        wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists())  # type: ignore[misc]
    cluster.engine.check()


def test_streams_run_over_a_rolling_restart(
    config: Config,
    start: Callable[[Config], BootedCluster],
    asked: list[GenerateRequest],
    wanted: list[Answer],
) -> None:
    cluster = start(config)
    stream_over_a_rolling_restart(cluster, asked, wanted)
    # Nobody was sent elsewhere: each worker had the time to end what it had begun.
    assert cluster.engine.stats().num_migrations == 0


@pytest.mark.slow
def test_prefill_and_decode_workers_take_turns_in_it(
    config: Config,
    start: Callable[[Config], BootedCluster],
    asked: list[GenerateRequest],
    wanted: list[Answer],
) -> None:
    apart = ClusterConfig(prefill=1, decode=1, handoff="always", restart_delay_s=0)
    cluster = start(replace(config, cluster=apart))
    stream_over_a_rolling_restart(cluster, asked, wanted)
    assert cluster.engine.stats().num_migrations == 0


@pytest.mark.slow
def test_what_takes_too_long_goes_on_elsewhere_and_counts_as_no_loss(
    config: Config,
    start: Callable[[Config], BootedCluster],
    asked: list[GenerateRequest],
    wanted: list[Answer],
) -> None:
    cluster = start(
        replace(
            config,
            cluster=replace(config.cluster, max_migrations=0),
            server=ServerConfig(drain_timeout_s=0),
        )
    )
    stream_over_a_rolling_restart(cluster, asked, wanted)
    assert cluster.engine.stats().num_migrations > 0


def test_a_hang_up_restarts_the_workers_of_a_server(config: Config) -> None:
    command = [sys.executable, "-m", "headrace.cli.main", "serve", config.model.path, "--workers=2"]
    command += ["--port=0", "--threads=1", "--kv-memory=1MiB", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = next(line for line in server.stdout if '"url"' in line).split('"')[3]
        server.send_signal(signal.SIGHUP)

        def is_done() -> bool:
            text = httpx.get(f"{url}/metrics").text
            starts = [f'headrace_worker_starts_total{{worker="w{n}"}} 2.0' for n in range(2)]
            return all(line in text for line in starts)

        wait_until(is_done)
        body = {"prompt": "once", "max_tokens": 5}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        server.send_signal(signal.SIGTERM)
    assert server.returncode == 0
