"""Copies share links fairly, and take their latency and their bytes' time."""

import pytest

from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.cost.fitted import Link
from headrace.sim.network import Network
from headrace.sim.runtime import SimRuntime

LINK = Link(latency_ns=1e6, byte_ns=1.0)


class Rig:
    def __init__(self) -> None:
        self.runtime = SimRuntime()
        self.network = Network(LINK, self.runtime)
        self.ends: dict[str, tuple[float, float]] = {}  # seconds, bytes

    def send(self, name: str, source: str, target: str, num_bytes: float) -> None:
        def ended(arrived: float) -> None:
            self.ends[name] = self.runtime.now / NS_PER_S, arrived

        self.network.send(source, target, num_bytes, ended)

    def at(self, second: float, call: object) -> None:
        self.runtime.call_at(Ns(round(second * NS_PER_S)), call)  # type: ignore[arg-type]

    def run(self) -> dict[str, tuple[float, float]]:
        self.runtime.run(max_calls=1000)
        return self.ends


def test_alone_a_copy_has_the_whole_link() -> None:
    rig = Rig()
    rig.send("a", "p", "d", 1e9)
    assert rig.run()["a"] == pytest.approx((1.001, 1e9))


def test_copies_to_one_worker_share_its_link() -> None:
    rig = Rig()
    rig.send("a", "p", "d", 1e9)
    rig.send("b", "q", "d", 0.5e9)
    # Half each until b is there after a second; then a has all of it.
    ends = rig.run()
    assert ends["b"][0] == pytest.approx(1.001)
    assert ends["a"][0] == pytest.approx(1.501)


def test_what_one_link_leaves_is_for_others() -> None:
    """p sends to d, q sends to d and to e: q's copy to e may have what that to d leaves of q."""
    rig = Rig()
    for name, source, target in (
        ("a", "p", "d"),
        ("b", "r", "d"),
        ("c", "q", "d"),
        ("e", "q", "e"),
    ):
        rig.send(name, source, target, 1e9)
    ends = rig.run()
    assert ends["e"][0] == pytest.approx(1.501)  # at 2/3, beside 1/3 for c
    assert all(ends[name][0] > 2.5 for name in "abc")


def test_a_lost_place_ends_what_crosses_it_and_leaves_its_room() -> None:
    rig = Rig()
    rig.send("a", "p", "d", 1e9)
    rig.send("b", "p", "e", 1e9)
    rig.at(1.001, lambda: rig.network.lose("e"))
    ends = rig.run()
    assert ends["b"] == pytest.approx((1.001, 0.5e9))
    assert ends["a"][0] == pytest.approx(1.501)


def test_what_has_not_begun_to_move_has_moved_nothing() -> None:
    rig = Rig()
    rig.send("a", "p", "d", 1e9)
    rig.network.lose("p")
    assert rig.run()["a"] == (0.0, 0.0)


def test_nothing_to_copy_takes_the_latency() -> None:
    rig = Rig()
    rig.send("a", "p", "d", 0.0)
    assert rig.run()["a"] == pytest.approx((0.001, 0.0))
