"""What an operator hears by default of workers that go and come back."""

from collections.abc import Iterator

import pytest

from headrace.cluster.fleet import Cause
from headrace.cluster.returns import FLEET, Returns
from headrace.cluster.roles import AUTOSCALER
from headrace.cluster.rolling import RollingRestart
from headrace.cluster.wire import Beat, RoleIs
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.base.worker import Role
from unit.cluster.test_crew import Rig, ready
from unit.cluster.test_fleet import NOW, fleet_of, named
from unit.cluster.test_roles import ask, serve
from unit.cluster.test_states import bring_up


@pytest.fixture(autouse=True)
def _shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", FLEET.name)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.crew.end()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [record.getMessage() for record in caplog.records if record.name == FLEET.name]
    caplog.clear()
    return said


def after(seconds: float) -> Ns:
    return Ns(NOW + round(seconds * NS_PER_S))


def test_who_comes_back_is_named_with_the_time_and_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = fleet_of(workers=1)
    returns = Returns(fleet)
    bring_up(fleet)
    slot = named(fleet, "w0")
    returns.back(NOW, slot)
    assert lines(caplog) == []  # it was not away
    fleet.lose(slot, NOW, Cause.SILENT, "it has fallen silent")
    returns.away(NOW, slot, "it has fallen silent", is_failure=True)
    returns.away(after(2), slot, "its process has ended", is_failure=True)
    returns.back(after(3.25), slot)
    assert lines(caplog) == ["worker w0 is back after 3.2 s: its process has ended"]
    fleet.leave(slot, NOW, comes_back=True)
    fleet.end(slot, NOW)
    returns.away(NOW, slot, "it was asked to leave", is_failure=False)
    returns.back(after(1), slot)
    returns.back(after(2), slot)
    assert lines(caplog) == ["worker w0 is back after 1.0 s: it was to restart"]


def test_who_was_sent_away_for_good_does_not_come_back(caplog: pytest.LogCaptureFixture) -> None:
    """A pool that shrinks and grows again is the autoscaler's matter."""
    fleet = fleet_of(workers=1)
    returns = Returns(fleet)
    bring_up(fleet)
    slot = named(fleet, "w0")
    fleet.leave(slot, NOW, comes_back=False)
    fleet.end(slot, NOW)
    returns.away(NOW, slot, "it was asked to leave", is_failure=False)
    returns.back(after(1), fleet.grow(Role.MIXED))
    assert lines(caplog) == []


def test_a_worker_of_another_machine_comes_back_under_its_name(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    slot, _ = rig.come()
    rig.say(slot, ready())
    rig.wait(5.0)
    assert not list(rig.fleet)
    rig.wait(2.0)
    again, _ = rig.come()
    rig.say(again, ready())
    assert lines(caplog) == ["worker box-0 is back after 2.0 s: it has fallen silent"]


def test_a_change_of_role_names_who_has_asked(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    slot, _ = serve(rig, Role.PREFILL)
    ask(rig, "box-0", Role.DECODE)
    rig.say(slot, RoleIs(Role.DECODE))
    rig.say(slot, RoleIs(Role.DECODE))  # to all front ends, whoever has asked
    rig.crew.roles.begin(slot, Role.MIXED, AUTOSCALER)
    rig.say(slot, RoleIs(Role.MIXED))
    rig.say(slot, RoleIs(Role.PREFILL))
    assert lines(caplog) == [
        "worker box-0 is for decode now, not for prefill: an operator has asked, 0.0 s ago",
        "worker box-0 is for mixed now, not for decode: the autoscaler has asked, 0.0 s ago",
        "worker box-0 is for prefill now, not for mixed: another front end has asked",
    ]


def test_a_rolling_restart_says_when_it_begins_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(workers=2)
    rig.wait(0.0)
    for slot in rig.fleet:
        rig.say(slot, ready())
    rolling = RollingRestart(rig.crew)
    rolling.begin()
    for _ in range(9):
        rolling.turn()
        rig.wait(1.5)
        for slot in rig.fleet:
            if slot.is_ready:
                rig.say(slot, Beat())
            elif slot.process is not None:
                rig.say(slot, ready())
    assert lines(caplog) == [
        "a rolling restart was asked for and begins: w0, w1",
        "worker w0 is back after 0.0 s: it was to restart",
        "worker w1 is back after 0.0 s: it was to restart",
        "the rolling restart of 2 workers has ended in 0.0 s",
    ]
    rig.crew.end()


def test_nobody_waits_for_a_restart_of_those_that_came_by_themselves(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    serve(rig, Role.MIXED)
    RollingRestart(rig.crew).begin()
    (line,) = lines(caplog)
    assert "no worker of this front end serves" in line
