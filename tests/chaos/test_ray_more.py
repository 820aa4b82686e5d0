"""What else Ray has to bear: token authentication, prefill and decode on nodes of their own, a pool
that grows and shrinks, and the loss of the head. As test_ray.py, with the same needs.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.test_workers import requests, tiny_config, undisturbed
from support.ray_front import outputs_of, ray_front
from support.ray_machines import (
    HEAD,
    end_all,
    ray_machines,
    short_folder,
    start_both,
    workers_in,
)

pytest.importorskip("headrace.ops.native._native")
pytest.importorskip("ray", reason="needs the extra [ray]")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        shutil.which("ip") is None or os.geteuid() != 0, reason="needs root and ip(8)"
    ),
]

TOKEN = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "1f" * 32,
    # How long Ray's nodes and drivers wait for a head that is gone.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "30",
}
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}
WAIT_S = 120.0


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[str, str]]:
    """Whose Ray knows only those who have the token."""
    with ray_machines(TOKEN) as names:
        yield names


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    config = tiny_config(tmp_path_factory.mktemp("alone"))
    return outputs_of(undisturbed(config, requests(24)))


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def wait_until_spread(machines: tuple[str, str], *numbers: int) -> None:
    """Until so many workers run in each of them."""
    wait_until(lambda: tuple(map(workers_in, machines)) == numbers)


@pytest.mark.parametrize(
    "env", [NO_TOKEN, {**TOKEN, "RAY_AUTH_TOKEN": "2e" * 32}], ids=["none", "another"]
)
def test_without_the_token_the_start_says_what_is_missing(
    machines: tuple[str, str], tmp_path: Path, env: dict[str, str]
) -> None:
    with ray_front(machines[0], tmp_path, HEAD, env, cluster={"workers": 1}) as front:
        told = front.hear()
        assert "does not take this machine as a driver" in told["error"]
        assert "RAY_AUTH_MODE=token" in told["hint"]
        assert front.process.wait(60) == 2


def test_prompts_are_computed_on_one_node_and_decoded_on_the_other(
    machines: tuple[str, str], tmp_path: Path, wanted: list[list[str]]
) -> None:
    apart = {"prefill": 1, "decode": 1, "handoff": "always"}
    with ray_front(machines[0], tmp_path, HEAD, TOKEN, cluster=apart) as front:
        assert front.hear()["ready"] == ["d0", "p0"]
        wait_until_spread(machines, 1, 1)
        told = front.ask(6)
        assert told["outputs"] == wanted[:6]
        assert told["num_handoffs"] == 6
        front.end()
    wait_until_spread(machines, 0, 0)


def test_a_pool_takes_a_place_on_another_node_and_gives_it_back(
    machines: tuple[str, str], tmp_path: Path, wanted: list[list[str]]
) -> None:
    hurried = {
        "enabled": True, "max_replicas": 2, "predictor": "constant", "margin": 0.8,
        "start_up_s": 1, "warm_up_s": 0, "load_interval_s": 0.2, "throughput_interval_s": 1,
        "breach_s": 0.4, "down_delay_s": 1, "idle_s": 1,
    }  # fmt: skip
    with ray_front(
        machines[0], tmp_path, HEAD, TOKEN,
        cluster={"workers": 1, "on_cpus": 2},  # a whole node for each
        autoscaler=hurried, scheduler={"max_running_seqs": 1},
    ) as front:  # fmt: skip
        front.hear()
        assert sum(map(workers_in, machines)) == 1
        for _ in range(3):  # how long answers are is known before the burst comes
            front.ask(1)
        front.say("ask", 24)
        wait_until_spread(machines, 1, 1)
        assert front.hear() == {"has_begun": True}
        told = front.hear()
        assert told["outputs"] == wanted
        told = front.wait(1)
        assert told["num_migrations"] == 0  # it was drained
        wait_until(lambda: sum(map(workers_in, machines)) == 1)
        assert front.ask(2)["outputs"] == wanted[:2]
        front.end()


def test_without_a_head_what_runs_goes_on_and_a_new_head_gives_places_anew(
    machines: tuple[str, str], tmp_path: Path, wanted: list[list[str]]
) -> None:
    """It is the last test, as it leaves no head behind."""
    with (
        short_folder() as folder,
        ray_front(machines[0], tmp_path, HEAD, TOKEN, cluster={"workers": 2}) as front,
    ):
        assert front.hear()["ready"] == ["w0", "w1"]
        front.say("ask", 6)
        assert front.hear() == {"has_begun": True}
        end_all(machines[0], having="gcs_server")
        told = front.hear()
        assert (told["outputs"], told["num_migrations"]) == (wanted[:6], 0)
        # Ray ends its nodes, and their workers with them.
        wait_until_spread(machines, 0, 0)
        for name in machines:
            for program in ("raylet", "gcs_server", "ray::", "dashboard"):
                end_all(name, having=program)
        start_both(*machines, folder, TOKEN)
        front.wait(2)
        assert front.ask(6)["outputs"] == wanted[:6]
        front.end()
