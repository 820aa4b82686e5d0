"""Workers in places that somebody else hands out: they come to the door, leave, and are sent for
again elsewhere. Ray itself is met in test_ray.py.
"""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from chaos.test_workers import all_up, answers, requests, tiny_config, undisturbed, wait_until
from headrace.cluster.boot import BootedCluster, boot_cluster
from headrace.core.base.errors import ConfigError
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import Config
from support.placement import ProcessPlacer

pytest.importorskip("headrace.ops.native._native")
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return placed_config(tmp_path_factory.mktemp("model"), workers=2)


def placed_config(folder: Path, **cluster: object) -> Config:
    options = {"on": "ray", "restart_delay_s": 0.05} | cluster
    return replace(
        tiny_config(folder),
        cluster=ClusterConfig(**options),  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def placer() -> ProcessPlacer:
    return ProcessPlacer()


@pytest.fixture(scope="module")
def cluster(config: Config, placer: ProcessPlacer) -> Iterator[BootedCluster]:
    booted = boot_cluster(config, placer=placer)
    try:
        yield booted
    finally:
        booted.close()
        assert placer.is_closed
        assert not placer.pids


def struck(
    config: Config,
    cluster: BootedCluster,
    placer: ProcessPlacer,
    strike: Callable[[list[int]], None],
) -> list[int]:
    """Have the cluster's workers, which these are, struck while they answer: no byte differs."""
    asked = requests(6)
    wanted = undisturbed(config, asked)
    wait_until(lambda: all_up(cluster))
    pids = placer.pids
    assert answers(cluster.text_engine, asked, strike=lambda: strike(pids)) == wanted
    return pids


def test_a_lost_one_is_sent_for_again_and_no_byte_differs(
    config: Config, cluster: BootedCluster, placer: ProcessPlacer
) -> None:
    num_migrations = cluster.engine.stats().num_migrations
    victim = struck(config, cluster, placer, lambda pids: os.kill(pids[0], signal.SIGKILL))[0]
    wait_until(lambda: all_up(cluster))
    assert victim not in placer.pids
    assert cluster.engine.stats().num_migrations > num_migrations
    cluster.engine.check()


def test_one_that_is_told_to_end_is_drained_and_sent_for_again(
    config: Config, cluster: BootedCluster, placer: ProcessPlacer
) -> None:
    num_migrations = cluster.engine.stats().num_migrations
    victim = struck(config, cluster, placer, lambda pids: os.kill(pids[0], signal.SIGTERM))[0]
    wait_until(lambda: all_up(cluster) and victim not in placer.pids)
    assert cluster.engine.stats().num_migrations == num_migrations
    cluster.engine.check()


def test_they_take_turns_in_a_rolling_restart(
    config: Config, cluster: BootedCluster, placer: ProcessPlacer
) -> None:
    before = struck(config, cluster, placer, lambda pids: cluster.engine.restart_workers())
    wait_until(lambda: not {*before} & {*placer.pids} and all_up(cluster))
    cluster.engine.check()


def test_the_secret_is_in_no_name_and_no_command_line(placer: ProcessPlacer) -> None:
    secrets = {order.secret for order in placer.orders}
    assert len(secrets) == 1
    (secret,) = secrets
    assert len(secret) == 32
    for pid in placer.pids:
        for file in ("cmdline", "environ"):
            text = Path(f"/proc/{pid}/{file}").read_bytes()
            assert secret not in text
            assert secret.hex().encode() not in text
    for order in placer.orders:
        assert str(secret) not in repr(order)
    assert len({order.ticket for order in placer.orders}) == len(placer.orders)


def test_where_there_is_no_place_the_start_says_so(tmp_path: Path) -> None:
    placer = ProcessPlacer(num_places=1)
    with pytest.raises(ConfigError, match="all 1 places are taken"):
        boot_cluster(placed_config(tmp_path, workers=2), placer=placer)
    assert placer.is_closed
    assert not placer.pids


def test_a_model_that_is_not_there_is_missed_by_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front end has it under this name, and no worker does."""
    config = placed_config(tmp_path)
    path = Path(config.model.path)
    copy = path.rename(tmp_path / "moved.gguf")
    monkeypatch.setattr("headrace.cluster.boot.resolve_model", lambda *_: copy)
    with pytest.raises(ConfigError, match=r"tiny\.gguf: .* on node here"):
        boot_cluster(config, placer=ProcessPlacer())


def test_a_role_changes_in_its_place_and_is_sent_for_again(
    config: Config, cluster: BootedCluster, placer: ProcessPlacer
) -> None:
    wait_until(lambda: all_up(cluster))
    pids = placer.pids
    cluster.engine.set_role("w0", Role.PREFILL).result(15.0)
    assert placer.pids == pids

    def strike(pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    struck(config, cluster, placer, strike)
    wait_until(lambda: all_up(cluster))
    assert {one.name: one.role for one in cluster.engine.workers()} == {
        "w0": "prefill",
        "w1": "mixed",
    }
    cluster.engine.set_role("w0", Role.MIXED).result(15.0)
