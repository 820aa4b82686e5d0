"""Sessions over workers in processes of their own: each stays as long as its worker is up."""

import os
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from chaos.test_workers import tiny_config, wait_until
from headrace.cluster.boot import boot_cluster
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import RouterConfig
from support.http_server import running_server

pytest.importorskip("headrace.ops.native._native")
pytestmark = pytest.mark.timeout(120)

Fields = dict[str, str]
WAYS: tuple[Callable[[str], tuple[Fields, Fields]], ...] = (
    lambda name: ({"x-session-id": name}, {}),
    lambda name: ({}, {"prompt_cache_key": name}),
    lambda name: ({}, {"user": name}),
)


def test_a_session_has_one_worker_however_it_is_named(tmp_path: Path) -> None:
    config = replace(
        tiny_config(tmp_path),
        cluster=ClusterConfig(workers=3, restart_delay_s=3600),
        router=RouterConfig(policy="session"),
    )
    with closing(boot_cluster(config)) as cluster, running_server(cluster) as server:

        def homes() -> dict[str, str]:
            found: dict[str, set[str]] = {}
            for number in range(12):
                name = f"session {number}"
                for way in WAYS:
                    headers, fields = way(name)
                    answer = httpx.post(
                        f"{server.url}/v1/completions",
                        json={"prompt": [number, 2], "max_tokens": 1, **fields},
                        headers=headers,
                    )
                    assert answer.status_code == 200
                    found.setdefault(name, set()).add(answer.headers["x-headrace-worker"])
            assert all(len(workers) == 1 for workers in found.values())
            return {name: workers.pop() for name, workers in found.items()}

        def is_up(name: str) -> bool:
            return next(one.is_ready for one in cluster.engine.workers() if one.name == name)

        before = homes()
        assert homes() == before
        assert set(before.values()) == {"w0", "w1", "w2"}
        for _ in range(2):  # the first life is followed by another one at once
            wait_until(lambda: is_up("w1"))
            pid = next(one.pid for one in cluster.engine.workers() if one.name == "w1")
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not is_up("w1"))
        wait_until(lambda: not is_up("w1"))
        after = homes()
        assert set(after.values()) == {"w0", "w2"}
        stayed = {name for name in before if before[name] == after[name]}
        assert stayed == {name for name in before if before[name] != "w1"}
