"""Workers that are for something else from one moment to the next, in processes of their own: the
same bytes, and nobody starts anew.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from chaos.test_workers import Answer, answers, requests, tiny_config, undisturbed, wait_until
from headrace.cli.main import main
from headrace.cli.top import facts, figures
from headrace.cli.top_reading import read
from headrace.cluster.boot import BootedCluster, boot_cluster
from headrace.core.base.errors import RequestError
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import Config, SchedulerConfig
from headrace.live.generate import GenerateRequest
from headrace.live.port import WorkerState
from support.beside import again_and_again
from support.http_server import running_server
from support.remote_worker import free_ports, listening, remote_worker

pytest.importorskip("headrace.ops.native._native")
pytestmark = pytest.mark.timeout(120)

ANSWER_S = 15.0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return tiny_config(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def asked() -> list[GenerateRequest]:
    return requests(8)


@pytest.fixture(scope="module")
def wanted(config: Config, asked: list[GenerateRequest]) -> list[Answer]:
    return undisturbed(config, asked)


@pytest.fixture(scope="module")
def cluster(config: Config) -> Iterator[BootedCluster]:
    apart = ClusterConfig(
        prefill=1, decode=1, handoff="always", silence_timeout_s=2.0, restart_delay_s=0
    )
    # Steps are short, so that KV goes while the rest of a prompt is computed.
    short = replace(config, cluster=apart, scheduler=SchedulerConfig(step_tokens=16))
    with closing(boot_cluster(short)) as cluster:
        yield cluster


def worker(cluster: BootedCluster, name: str) -> WorkerState:
    return next(one for one in cluster.engine.workers() if one.name == name)


def num_cached(cluster: BootedCluster, name: str) -> int:
    stats = worker(cluster, name).stats
    return 0 if stats is None else stats.num_cached_blocks


def settle(cluster: BootedCluster) -> None:
    wait_until(lambda: all(one.is_ready for one in cluster.engine.workers()))
    wait_until(lambda: cluster.engine.stats().num_pinned_blocks == 0)
    cluster.engine.check()


def change(cluster: BootedCluster, name: str, role: Role) -> None:
    cluster.engine.set_role(name, role).result(ANSWER_S)


def salted(asked: list[GenerateRequest], salt: str) -> list[GenerateRequest]:
    """Nothing of these is cached anywhere."""
    return [replace(request, salt=salt) for request in asked]


@contextmanager
def swinging(url: str, name: str, roles: tuple[str, ...]) -> Iterator[list[str]]:
    """Somebody changes its role again and again: what was answered."""
    told = list[str]()

    def swing() -> None:
        role = roles[len(told) % len(roles)]
        answer = httpx.post(f"{url}/admin/workers/{name}/role", json={"role": role})
        assert answer.status_code == 200, answer.text
        told.append(answer.json()["role"])

    with again_and_again(swing, 0.02):
        yield told


def test_there_and_back_under_streams(
    cluster: BootedCluster, asked: list[GenerateRequest], wanted: list[Answer]
) -> None:
    pids = {one.name: one.pid for one in cluster.engine.workers()}
    with (
        running_server(cluster) as server,
        swinging(server.url, "p0", ("decode", "mixed", "prefill")) as told,
    ):
        num_rounds = 0
        while len(told) < 9 or num_rounds < 2:
            assert answers(cluster.text_engine, salted(asked, f"swing {num_rounds}")) == wanted
            num_rounds += 1
    assert told[:3] == ["decode", "mixed", "prefill"]
    assert cluster.engine.stats().num_migrations == 0
    assert {one.name: (one.pid, one.num_starts) for one in cluster.engine.workers()} == {
        name: (pid, 1) for name, pid in pids.items()
    }
    settle(cluster)


def test_each_does_what_it_is_for_and_has_what_it_had(
    cluster: BootedCluster, asked: list[GenerateRequest], wanted: list[Answer]
) -> None:
    change(cluster, "p0", Role.PREFILL)
    num_before = cluster.engine.stats().num_handoffs
    assert answers(cluster.text_engine, salted(asked, "one")) == wanted
    assert cluster.engine.stats().num_handoffs == num_before + len(asked)
    settle(cluster)
    time.sleep(0.5)  # for the workers' last word on their state
    cached = {name: num_cached(cluster, name) for name in ("p0", "d0")}
    assert min(cached.values()) > len(asked)
    change(cluster, "p0", Role.DECODE)
    change(cluster, "d0", Role.PREFILL)
    time.sleep(0.5)
    assert {name: num_cached(cluster, name) for name in ("p0", "d0")} == cached
    assert answers(cluster.text_engine, salted(asked, "one")) == wanted
    assert cluster.engine.stats().num_handoffs == num_before + 2 * len(asked)
    settle(cluster)
    with running_server(cluster) as server:
        page = httpx.get(f"{server.url}/metrics").text
    assert 'headrace_worker_role{role="decode",worker="p0"} 1.0' in page
    change(cluster, "d0", Role.DECODE)
    change(cluster, "p0", Role.PREFILL)
    assert answers(cluster.text_engine, salted(asked, "two")) == wanted
    settle(cluster)


def test_whoever_takes_its_place_is_for_the_same(
    cluster: BootedCluster, asked: list[GenerateRequest], wanted: list[Answer]
) -> None:
    change(cluster, "p0", Role.DECODE)
    before = worker(cluster, "p0")
    assert before.pid is not None

    def strike() -> None:
        assert before.pid is not None
        os.kill(before.pid, signal.SIGKILL)

    assert answers(cluster.text_engine, salted(asked, "struck"), strike=strike) == wanted
    settle(cluster)
    after = worker(cluster, "p0")
    assert (after.role, after.num_starts) == ("decode", before.num_starts + 1)
    change(cluster, "p0", Role.PREFILL)


def test_a_worker_that_does_not_answer_begins_again_as_it_was_to_be(
    cluster: BootedCluster, asked: list[GenerateRequest], wanted: list[Answer]
) -> None:
    pid = worker(cluster, "p0").pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    change(cluster, "p0", Role.DECODE)
    settle(cluster)
    assert worker(cluster, "p0").pid != pid
    assert worker(cluster, "p0").role == "decode"
    change(cluster, "p0", Role.PREFILL)
    assert answers(cluster.text_engine, salted(asked, "stopped")) == wanted


@pytest.mark.parametrize(
    ("name", "body", "status", "text"),
    [
        ("x9", {"role": "decode"}, 404, "there is no worker 'x9'; one of p0, d0"),
        ("d0", {"role": "prefill"}, 409, "the last one that decodes"),
        ("d0", {"role": "cook"}, 400, "one of mixed, prefill, decode is expected"),
        ("d0", {"rule": "decode"}, 400, 'a body like {"role": "decode"} is expected'),
        ("d0", [], 400, 'a body like {"role": "decode"} is expected'),
    ],
)
def test_what_cannot_be_is_refused(
    cluster: BootedCluster, name: str, body: object, status: int, text: str
) -> None:
    with running_server(cluster) as server:
        answer = httpx.post(f"{server.url}/admin/workers/{name}/role", json=body)
        assert (answer.status_code, text in answer.json()["error"]["message"]) == (status, True)
        assert [one.role for one in cluster.engine.workers()] == ["prefill", "decode"]


def test_a_command_asks_for_it_and_top_shows_it(
    cluster: BootedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_server(cluster) as server:
        assert main(["role", "p0", "mixed", f"{server.url}/v1"]) == 0
        assert capsys.readouterr().out == "worker p0 is for mixed now\n"
        assert facts(figures(read(server.url), None))["workers"]["p0"].startswith("mixed, ready")
        assert main(["role", "p0", "prefill", server.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["role"] == "prefill"
        assert main(["role", "d0", "prefill", server.url]) == 2
        assert "the last one that decodes" in capsys.readouterr().err
    assert main(["role", "p0", "mixed", server.url]) == 2
    assert "does not answer" in capsys.readouterr().err
    assert main(["role", "p0", "mixed", "ftp://here"]) == 2
    assert worker(cluster, "p0").role == "prefill"


def test_a_page_in_a_browser_of_this_machine_may_not_ask(cluster: BootedCluster) -> None:
    with running_server(cluster) as server:
        for headers in ({"origin": "http://elsewhere.example"}, {"x-forwarded-for": "10.0.0.1"}):
            answer = httpx.post(
                f"{server.url}/admin/workers/p0/role", json={"role": "decode"}, headers=headers
            )
            assert answer.status_code == 404
        assert worker(cluster, "p0").role == "prefill"


def test_all_front_ends_agree_also_after_one_has_come_again(
    config: Config, tmp_path: Path, asked: list[GenerateRequest], wanted: list[Answer]
) -> None:
    ports = free_ports(2)
    ours, theirs = (
        replace(
            config,
            cluster=listening(tmp_path, port, silence_timeout_s=2.0, handoff="always"),
        )
        for port in ports
    )

    def is_so(front: BootedCluster, *roles: str) -> bool:
        return sorted(one.role for one in front.engine.workers() if one.is_ready) == sorted(roles)

    with (
        remote_worker(*ports, role="prefill", name="first"),
        remote_worker(*ports, role="decode", name="second"),
        closing(boot_cluster(theirs)) as other,
    ):
        with closing(boot_cluster(ours)) as front:
            wait_until(lambda: is_so(front, "prefill", "decode"))
            wait_until(lambda: is_so(other, "prefill", "decode"))
            change(front, "first-0", Role.DECODE)
            wait_until(lambda: is_so(other, "decode", "decode"))
            change(other, "second-0", Role.PREFILL)
            wait_until(lambda: is_so(front, "decode", "prefill"))
            assert answers(front.text_engine, asked) == wanted
            assert front.engine.stats().num_handoffs == len(asked)
            with pytest.raises(RequestError, match="the last one that decodes"):
                change(other, "first-0", Role.PREFILL)
            change(other, "second-0", Role.DECODE)
            wait_until(lambda: is_so(front, "decode", "decode"))
            for _ in range(10):  # at the same moment: at most one of them
                wishes = (
                    front.engine.set_role("first-0", Role.PREFILL),
                    other.engine.set_role("second-0", Role.PREFILL),
                )
                faults = [wish.exception(ANSWER_S) for wish in wishes]
                assert any(isinstance(fault, RequestError) for fault in faults)
                for name, fault in zip(("first-0", "second-0"), faults, strict=True):
                    if fault is None:
                        change(front, name, Role.DECODE)
                wait_until(lambda: is_so(front, "decode", "decode"))
                wait_until(lambda: is_so(other, "decode", "decode"))
            change(other, "second-0", Role.PREFILL)
            wait_until(lambda: is_so(front, "decode", "prefill"))
        with closing(boot_cluster(ours)) as again:
            wait_until(lambda: is_so(again, "decode", "prefill"))
            assert worker(again, "first-0").role == "decode"
            assert answers(again.text_engine, asked) == wanted
            again.engine.check()
        other.engine.check()
