"""Workers that come by themselves, over TCP."""

import os
import signal
import socket
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from chaos.test_workers import answers, requests, tiny_config, undisturbed, wait_until
from headrace.adapters.handshake import greeting
from headrace.cluster.boot import BootedCluster, boot_cluster
from headrace.core.config.schema import Config
from support.http_server import running_server
from support.remote_worker import listening, remote_worker

pytest.importorskip("headrace.ops.native._native")
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def config(tmp_path: Path, port: int) -> Config:
    cluster = listening(tmp_path, port, silence_timeout_s=2.0)
    return replace(tiny_config(tmp_path), cluster=cluster)


def names(cluster: BootedCluster) -> set[str]:
    return {worker.name for worker in cluster.engine.workers() if worker.is_ready}


def test_workers_come_and_go_and_no_byte_differs(config: Config, port: int) -> None:
    asked = requests(6)
    wanted = undisturbed(config, asked)
    with ExitStack() as stack:
        first = stack.enter_context(remote_worker(port, name="first"))
        cluster = boot_cluster(config)
        stack.callback(cluster.close)
        assert names(cluster) == {"first-0"}
        stack.enter_context(remote_worker(port, name="second"))
        stack.enter_context(remote_worker(port, name="stranger", secret="not the secret, no"))
        wait_until(lambda: len(names(cluster)) == 2)

        got = answers(cluster.text_engine, asked, strike=first.kill)
        assert got == wanted
        wait_until(lambda: names(cluster) == {"second-0"})
        cluster.engine.check()
        # While nobody is there, requests wait; who comes again is a new worker.
        stack.enter_context(remote_worker(port, name="third", role="decode"))
        wait_until(lambda: len(names(cluster)) == 2)
        assert answers(cluster.text_engine, asked) == wanted


def test_a_front_end_is_ready_while_a_worker_is_there(config: Config, port: int) -> None:
    with remote_worker(port, name="only") as only:
        cluster = boot_cluster(config)
        try:
            with running_server(cluster) as server:

                def ready() -> tuple[int, dict[str, str]]:
                    answer = httpx.get(f"{server.url}/ready")
                    return answer.status_code, answer.json()

                assert ready() == (200, {"status": "open"})
                only.kill()
                wait_until(lambda: ready()[0] == 503)
                hint = f"headrace worker --connect 127.0.0.1:{port} --secret-file FILE"
                detail = f"no worker that decodes is ready: none is there; start one: {hint}"
                assert ready()[1] == {"status": "waiting", "detail": detail}
                assert httpx.get(f"{server.url}/health").status_code == 200
                with remote_worker(port, name="next"):
                    wait_until(lambda: ready() == (200, {"status": "open"}))
        finally:
            cluster.close()


def test_a_worker_that_is_told_to_end_does_what_it_has_first(config: Config, port: int) -> None:
    asked = requests(6)
    wanted = undisturbed(config, asked)
    with remote_worker(port, name="first") as first, remote_worker(port, name="second") as second:
        cluster = boot_cluster(config)
        try:
            wait_until(lambda: len(names(cluster)) == 2)
            assert answers(cluster.text_engine, asked, strike=first.terminate) == wanted
            assert first.wait(30) == 0
            assert cluster.engine.stats().num_migrations == 0
            assert len(names(cluster)) == 1
            cluster.engine.check()
        finally:
            cluster.close()
        assert second.poll() is None


def test_a_worker_has_only_so_much_time_to_end(config: Config, port: int) -> None:
    asked = requests(6)
    wanted = undisturbed(config, asked)
    with remote_worker(port, name="hasty", drain_timeout_s=0) as hasty, remote_worker(port):
        cluster = boot_cluster(config)
        try:
            wait_until(lambda: len(names(cluster)) == 2)
            struck = answers(cluster.text_engine, asked, strike=hasty.terminate, num_begun=2)
            assert struck == wanted
            assert hasty.wait(30) == 0
            assert cluster.engine.stats().num_migrations > 0
            cluster.engine.check()
        finally:
            cluster.close()


def test_a_worker_that_leaves_waits_for_no_front_end_that_only_greets(
    config: Config, port: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, ExitStack() as stack:
        worker = stack.enter_context(
            remote_worker(port, mute.getsockname()[1], drain_timeout_s=100)
        )
        guest = stack.enter_context(mute.accept()[0])
        guest.sendall(greeting())
        cluster = boot_cluster(config)
        stack.callback(cluster.close)
        worker.terminate()
        assert worker.wait(30) == 0
        assert not names(cluster)


_FAULTS = """
import sys
from headrace.cluster import shared
from headrace.core.base.errors import DeviceError
boot, faults = shared.boot, [DeviceError("no device"), RuntimeError("odd")]
def faulty(*words, **names):
    if faults:
        fault = faults.pop()
        print("it fails:", fault, file=sys.stderr, flush=True)
        raise fault
    return boot(*words, **names)
shared.SharedEngine.__init__.__defaults__ = (faulty,)
"""


def test_a_worker_that_could_not_load_comes_again(config: Config, port: int) -> None:
    asked = requests(2)
    wanted = undisturbed(config, asked)
    with remote_worker(port, before=_FAULTS) as worker, ExitStack() as stack:
        cluster = boot_cluster(config)
        stack.callback(cluster.close)
        assert answers(cluster.text_engine, asked) == wanted
        cluster.engine.check()
        assert worker.poll() is None
        worker.kill()
        assert worker.stderr is not None
        said = worker.stderr.read()
        assert said.index("it fails: odd") < said.index("it fails: no device")


def test_prompts_are_handed_on_between_workers_that_came(config: Config, port: int) -> None:
    asked = requests(6)
    wanted = undisturbed(config, asked)
    with (
        remote_worker(port, role="prefill", name="p"),
        remote_worker(port, role="decode", name="d"),
    ):
        cluster = boot_cluster(replace(config, cluster=replace(config.cluster, handoff="always")))
        try:
            wait_until(lambda: len(names(cluster)) == 2)
            assert answers(cluster.text_engine, asked) == wanted
            addresses = [ready.kv_address for ready in cluster.ready]
            assert all("|tcp:" in address for address in addresses)
            wait_until(lambda: cluster.engine.stats().num_pinned_blocks == 0)
            wait_until(lambda: cluster.engine.stats().num_hit_tokens > 0)
            cluster.engine.check()
        finally:
            cluster.close()


@pytest.mark.slow
def test_a_worker_that_was_taken_for_lost_comes_again(config: Config, port: int) -> None:
    asked = requests(4)
    wanted = undisturbed(config, asked)
    with remote_worker(port) as worker, remote_worker(port):
        cluster = boot_cluster(config)
        try:
            wait_until(lambda: len(names(cluster)) == 2)

            def stop() -> None:
                os.kill(worker.pid, signal.SIGSTOP)
                threading.Timer(4, os.kill, (worker.pid, signal.SIGCONT)).start()

            assert answers(cluster.text_engine, asked, strike=stop) == wanted
            wait_until(lambda: sum(w.num_starts for w in cluster.engine.workers()) == 3)
            wait_until(lambda: len(names(cluster)) == 2)
            assert answers(cluster.text_engine, asked) == wanted
            cluster.engine.check()
        finally:
            cluster.close()


def test_another_model_is_not_let_in(config: Config, port: int, tmp_path: Path) -> None:
    """The front end's own worker has one file under this name, the other machine another one."""
    from support.tiny_model import write_tiny_model

    path = tmp_path / "here.gguf"
    write_tiny_model(path, seed=1)
    both = replace(
        config,
        cluster=replace(config.cluster, workers=1),
        model=replace(config.model, path=str(path)),
    )
    asked = requests(2)
    wanted = undisturbed(both, asked)
    cluster = boot_cluster(both)
    try:
        write_tiny_model(path, seed=2)
        with remote_worker(port) as worker:
            assert worker.stderr is not None
            assert worker.wait(60) != 0
            assert "the front end does not want this worker: it serves model and" in (
                worker.stderr.read()
            )
        assert names(cluster) == {"w0"}
        assert answers(cluster.text_engine, asked) == wanted
        cluster.engine.check()
    finally:
        cluster.close()
