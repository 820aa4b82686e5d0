"""Two front ends over the same workers: each may die, stop and come back, and the other one and its
readers notice nothing.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from chaos.test_workers import answers, requests, tiny_config, undisturbed, wait_until
from headrace.cluster.boot import BootedCluster, boot_cluster
from headrace.core.config.resolve import resolve
from headrace.core.config.schema import Config
from headrace.live.machine import machine_facts
from support.front_process import front_process
from support.remote_worker import free_ports, listening, remote_worker

pytest.importorskip("headrace.ops.native._native")
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def ports() -> list[int]:
    return free_ports(2)


@pytest.fixture
def config(tmp_path: Path, ports: list[int]) -> Config:
    cluster = listening(
        tmp_path,
        ports[0],
        silence_timeout_s=1.0,
        handoff="always",
    )
    return replace(tiny_config(tmp_path), cluster=cluster)


def num_ready(cluster: BootedCluster) -> int:
    return sum(worker.is_ready for worker in cluster.engine.workers())


def settle(cluster: BootedCluster) -> None:
    """Nobody's sequences run, nothing is held for anybody, and every law holds on every worker."""
    wait_until(lambda: _num_held(cluster) == 0)
    cluster.engine.check()


@contextmanager
def with_both_workers(config: Config) -> Iterator[BootedCluster]:
    with closing(boot_cluster(config)) as cluster:
        wait_until(lambda: num_ready(cluster) == 2)
        yield cluster


def _num_held(cluster: BootedCluster) -> int:
    stats = cluster.engine.stats()
    return stats.num_running + stats.num_waiting + stats.num_pinned_blocks


def test_a_front_end_dies_and_comes_back_and_the_other_notices_nothing(
    config: Config, tmp_path: Path, ports: list[int]
) -> None:
    asked = requests(5)
    wanted = undisturbed(config, asked)
    with remote_worker(*ports), remote_worker(*ports), with_both_workers(config) as cluster:
        with front_process(tmp_path, ports[1], num_workers=2) as other:
            assert other.hear()["is_up"]
            other.ask(5)
            assert other.hear()["has_begun"]
            assert answers(cluster.text_engine, asked, strike=other.process.kill) == wanted
        assert cluster.engine.stats().num_migrations == 0
        assert num_ready(cluster) == 2
        settle(cluster)

        with front_process(tmp_path, ports[1], num_workers=2) as again:
            assert again.hear()["is_up"]
            again.ask(5)
            assert again.hear()["has_begun"]
            facts = again.hear()
            assert facts["answers"] == repr(wanted)
            # It was told what is cached, of prompts that it had asked for in another life, too.
            assert min(facts["hits"]) >= 1
        settle(cluster)
        assert answers(cluster.text_engine, asked[:2]) == wanted[:2]


def test_a_worker_dies_under_two_front_ends_and_both_go_on_elsewhere(
    config: Config, tmp_path: Path, ports: list[int]
) -> None:
    asked = requests(5)
    wanted = undisturbed(config, asked)
    with (
        remote_worker(*ports) as victim,
        remote_worker(*ports),
        with_both_workers(config) as cluster,
        front_process(tmp_path, ports[1], num_workers=2) as other,
    ):
        assert other.hear()["is_up"]
        other.ask(5)
        assert other.hear()["has_begun"]
        assert answers(cluster.text_engine, asked, strike=victim.kill) == wanted
        facts = other.hear()
        assert facts["answers"] == repr(wanted)
        assert cluster.engine.stats().num_migrations + facts["migrations"] > 0
        assert answers(cluster.text_engine, asked[:2]) == wanted[:2]
        settle(cluster)


@pytest.mark.slow
def test_prompts_are_handed_on_within_each_front_ends_requests(
    config: Config, tmp_path: Path, ports: list[int]
) -> None:
    asked = requests(6)
    wanted = undisturbed(config, asked)
    with (
        remote_worker(*ports, role="prefill"),
        remote_worker(*ports, role="decode"),
        with_both_workers(config) as cluster,
    ):
        for _ in range(2):
            with front_process(tmp_path, ports[1], num_workers=2, handoff="always") as other:
                assert other.hear()["is_up"]
                other.ask(6)
                assert other.hear()["has_begun"]
                assert answers(cluster.text_engine, asked) == wanted
                facts = other.hear()
                assert facts["answers"] == repr(wanted)
                assert facts["handoffs"] == len(asked)
                other.ask(6)  # and in the middle of these it dies
                assert other.hear()["has_begun"]
                assert answers(cluster.text_engine, asked, strike=other.process.kill) == wanted
            settle(cluster)
        assert cluster.engine.stats().num_handoffs == 4 * len(asked)


@pytest.mark.slow
def test_a_front_end_that_stops_loses_its_workers_and_goes_on_when_it_wakes(
    config: Config, tmp_path: Path, ports: list[int]
) -> None:
    asked = requests(5)
    wanted = undisturbed(config, asked)
    with (
        remote_worker(*ports),
        remote_worker(*ports),
        with_both_workers(config) as cluster,
        front_process(tmp_path, ports[1], num_workers=2) as other,
    ):
        assert other.hear()["is_up"]
        other.ask(5)
        assert other.hear()["has_begun"]
        os.kill(other.process.pid, signal.SIGSTOP)
        assert answers(cluster.text_engine, asked) == wanted
        time.sleep(4.0)  # the workers wait for three seconds
        settle(cluster)
        os.kill(other.process.pid, signal.SIGCONT)
        facts = other.hear()
        assert facts["answers"] == repr(wanted)
        assert answers(cluster.text_engine, asked[:2]) == wanted[:2]
        settle(cluster)


def test_a_front_end_that_asks_for_something_else_is_told_so(
    config: Config, ports: list[int], tmp_path: Path
) -> None:
    from headrace.core.base.errors import ConfigError

    with remote_worker(*ports) as process, ExitStack() as stack:
        cluster = boot_cluster(config)
        stack.callback(cluster.close)
        other = replace(
            config,
            cluster=replace(config.cluster, listen=f"127.0.0.1:{ports[1]}"),
            kv=replace(config.kv, memory_bytes=config.kv.memory_bytes * 2),
        )
        with pytest.raises(ConfigError, match=r"serves another front end with kv.memory_bytes = "):
            boot_cluster(other)
        # What says in numbers what the first one leaves open is welcome.
        same = replace(other, kv=config.kv, device=resolve(config, machine_facts()).config.device)
        assert same.device.activations != config.device.activations
        with closing(boot_cluster(same)) as second:
            assert num_ready(second) == 1
        assert num_ready(cluster) == 1
        assert process.poll() is None
        cluster.engine.check()
        wanted = undisturbed(config, requests(2))
        assert answers(cluster.text_engine, requests(2)) == wanted
