"""Real workers that compute wrongly: they get no requests, or none any more, and say why."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from chaos.test_workers import all_up, answers, requests, tiny_config, undisturbed, wait_until
from headrace.cli.top import facts, figures
from headrace.cli.top_reading import read
from headrace.cluster.boot import BootedCluster, boot_cluster
from headrace.core.config.schema import Config
from headrace.live.port import WorkerState
from headrace.models.gguf import GgufFile
from support.http_server import running_server
from support.model_files import F32
from support.tiny_model import write_tiny_model

pytest.importorskip("headrace.ops.native._native")
pytestmark = pytest.mark.timeout(120)

# Between two pages that the digest of a model looks at, in its largest tensor.
HARM = slice(4096, 8192)


def embeddings(path: Path) -> bytes:
    return bytes(GgufFile(path).tensors["token_embd.weight"].data)


def harmed(data: bytes) -> bytes:
    """With every number there negated."""
    harm = bytearray(data[HARM])
    harm[3::4] = bytes(byte ^ 0x80 for byte in harm[3::4])
    return data[: HARM.start] + harm + data[HARM.stop :]


def exchange(path: Path, data: bytes) -> None:
    """Those who have it open keep what they have."""
    other = path.with_suffix(".other")
    other.write_bytes(data)
    os.replace(other, path)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = tiny_config(tmp_path)
    write_tiny_model(Path(config.model.path), matrices=F32)  # the digest leaves parts of it out
    quick = replace(config.cluster, restart_delay_s=0.1, canary_every_s=0.5)
    return replace(config, cluster=quick)


@pytest.fixture
def cluster(config: Config) -> Iterator[BootedCluster]:
    booted = boot_cluster(config)
    try:
        yield booted
    finally:
        booted.close()


def worker(cluster: BootedCluster, name: str) -> WorkerState:
    return next(one for one in cluster.engine.workers() if one.name == name)


def test_a_damaged_file_stops_a_rolling_restart_and_gets_no_request(
    config: Config, cluster: BootedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    asked = requests(4)
    wanted = undisturbed(config, asked)
    path = Path(config.model.path)
    whole = path.read_bytes()
    weights = embeddings(path)
    exchange(path, whole.replace(weights, harmed(weights)))

    got = answers(cluster.text_engine, asked, strike=cluster.engine.restart_workers)
    assert got == wanted
    wait_until(lambda: "canary_wrong" in worker(cluster, "w0").losses)
    assert answers(cluster.text_engine, asked) == wanted
    assert "the rolling restart has stopped at worker w0" in caplog.text
    with running_server(cluster) as server:
        metrics = httpx.get(f"{server.url}/metrics").text
        assert 'headrace_worker_losses_total{cause="canary_wrong",worker="w0"}' in metrics
        assert 'headrace_worker_up{worker="w0"} 0.0' in metrics
        told = {one["name"]: one for one in httpx.get(f"{server.url}/admin/workers").json()}
        assert told["w0"]["fault"].startswith("its canary is wrong: ")
        assert told["w1"]["phase"] == "ready"
        shown = facts(figures(read(server.url), None))["workers"]["w0"]
        assert "(last: canary wrong)" in shown

    exchange(path, whole)
    wait_until(lambda: all_up(cluster))
    assert worker(cluster, "w1").num_starts == 1
    cluster.engine.check()
    assert answers(cluster.text_engine, asked) == wanted


def harm_pool(pid: int, num_bytes: int) -> None:
    """Negate all that this process has cached."""
    files = Path(f"/proc/{pid}/fd").iterdir()
    pool = next(file for file in files if os.readlink(file).startswith("/memfd:headrace-kv"))
    with open(pool, "r+b") as memory:
        start = memory.seek(-num_bytes, os.SEEK_END)  # blocks come after their names
        blocks = bytearray(memory.read())
        blocks[1::2] = bytes(byte ^ 0x80 for byte in blocks[1::2])  # signs of bf16
        memory.seek(start)
        memory.write(blocks)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
def test_memory_that_changes_is_found_in_a_quiet_time(
    config: Config, cluster: BootedCluster
) -> None:
    asked = requests(4)
    wanted = undisturbed(config, asked)
    assert answers(cluster.text_engine, asked) == wanted
    victim = worker(cluster, "w1")
    assert victim.pid is not None
    harm_pool(victim.pid, config.kv.memory_bytes)
    wait_until(lambda: worker(cluster, "w1").losses == {"canary_wrong": 1})
    wait_until(lambda: all_up(cluster))
    assert worker(cluster, "w1").pid != victim.pid
    cluster.engine.check()
    assert answers(cluster.text_engine, asked) == wanted
