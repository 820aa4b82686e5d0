"""Which cluster is meant, and what a life in a place of it comes to."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cluster.placement.port import Ended, News, NoPlace, Order
from headrace.cluster.placement.process import Launcher
from headrace.cluster.placement.ray import RayPlacer, cluster_address
from headrace.cluster.wire import Unfit
from headrace.core.base.errors import ConfigError
from headrace.core.base.worker import Role


class FakePlacer:
    def __init__(self) -> None:
        self.hear: Callable[[News], None] = lambda news: None
        self.order: Order | None = None
        self.ended: list[str] = []

    def place(self, order: Order, hear: Callable[[News], None]) -> None:
        self.order, self.hear = order, hear

    def end(self, ticket: str) -> None:
        self.ended.append(ticket)

    def close(self) -> None: ...


def launcher(placer: FakePlacer | RayPlacer) -> Launcher:
    return Launcher(placer, front=("127.0.0.1", 1), secret=b"s" * 32, num_cpus=2, timeout_s=9)


def test_an_order_says_what_a_life_takes() -> None:
    placer = FakePlacer()
    awaited = launcher(placer)("p0", Role.PREFILL)
    order = placer.order
    assert order is not None
    assert (order.name, order.role, order.num_cpus, order.timeout_s) == ("p0", "prefill", 2, 9)
    assert order.ticket == awaited.ticket
    assert awaited.exit_status() is None
    awaited.kill()
    assert placer.ended == [awaited.ticket]


def test_no_place_is_a_reason_not_to_serve() -> None:
    placer = FakePlacer()
    awaited = launcher(placer)("w0", Role.MIXED)
    assert awaited.receive() == []
    placer.hear(NoPlace(awaited.ticket, "none", "add one"))
    assert awaited.receive() == [Unfit("none", "add one")]
    assert awaited.wait(0)
    awaited.kill()
    assert placer.ended == []  # it has ended by itself


def test_an_end_before_it_came_is_an_end() -> None:
    placer = FakePlacer()
    awaited = launcher(placer)("w0", Role.MIXED)
    placer.hear(Ended(awaited.ticket, "its node 10.0.0.3"))
    with pytest.raises(EOFError):
        awaited.receive()
    assert awaited.exit_status() == "its node 10.0.0.3"
    awaited.kill()


@pytest.mark.parametrize(
    ("on", "variables", "address"),
    [
        ("ray://10.0.0.1:6379", {}, ("10.0.0.1", 6379)),
        ("ray://[::1]:6379/", {}, ("::1", 6379)),
        ("ray", {"RAY_ADDRESS": "10.0.0.2:6379"}, ("10.0.0.2", 6379)),
        ("ray", {"RAY_ADDRESS": ""}, ("10.0.0.3", 6379)),
        ("ray", {"RAY_ADDRESS": "auto"}, ("10.0.0.3", 6379)),
    ],
)
def test_a_cluster_is_named_by_its_head_or_by_this_machine(
    on: str,
    variables: dict[str, str],
    address: tuple[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").write_text("10.0.0.3:6379\n")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, value in (variables | {"RAY_TMPDIR": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    assert cluster_address(on) == address


@pytest.mark.parametrize(
    ("on", "variable", "words"),
    [
        ("k8s", "", "which names no cluster"),
        ("ray://10.0.0.1", "", "is no HOST:PORT"),
        ("ray", "", "no Ray cluster runs on this machine"),
        ("ray", "ray://10.0.0.1:10001", "of a client of Ray, and a driver is needed"),
    ],
)
def test_other_names_are_refused(
    on: str, variable: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", variable)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(ConfigError, match=words):
        cluster_address(on)


def test_a_driver_that_cannot_work_says_why_to_all_who_wait() -> None:
    """Without Ray, or without a cluster at that address, as the case may be here."""
    placer = RayPlacer("127.0.0.1", 1)
    try:
        awaited = launcher(placer)("w0", Role.MIXED)
        assert awaited.wait(60)
        (told,) = awaited.receive()
        assert isinstance(told, Unfit)
        assert "no Ray cluster at 127.0.0.1:1" in told.message or "cannot be imported" in (
            told.message
        )
        assert told.hint
        awaited.kill()
    finally:
        placer.close()
    late = launcher(placer)("w1", Role.MIXED)
    assert late.wait(0)
    late.kill()


def test_ray_is_imported_by_nobody_who_did_not_ask_for_it() -> None:
    names = "headrace.cli.serve, headrace.cluster.boot, headrace.cluster.placement.driver"
    code = f"import sys, {names}; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
