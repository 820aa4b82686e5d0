"""Slots: who is started, who goes for good, who comes back, and under which name."""

from typing import Any, cast

import pytest

from headrace.cluster.fleet import MAX_BAD_STARTS, MAX_GONE, Cause, Fleet, Slot
from headrace.cluster.process import WorkerProcess
from headrace.cluster.wire import Configure, FromWorker, Hello, Ready, ToWorker
from headrace.core.base.types import NS_PER_S, Ns, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import Config
from headrace.core.engine.stats import EngineStats

NOW = Ns(NS_PER_S)
READY = cast("Ready", None)


class FakeProcess:
    pid = 1
    has_unsent = False

    def __init__(self) -> None:
        self.is_killed = False
        self.sent: list[ToWorker] = []

    def fileno(self) -> int:
        raise NotImplementedError

    def send(self, message: ToWorker) -> None:
        self.sent.append(message)

    def flush(self) -> None: ...

    def receive(self) -> list[FromWorker]:
        return []

    def close(self) -> None: ...

    def kill(self) -> None:
        self.is_killed = True

    def wait(self, timeout_s: float) -> bool:
        return True

    def exit_status(self) -> str | None:
        return None


def fleet_of(**counts: Any) -> Fleet:
    def launch(slot: Slot) -> WorkerProcess:
        return FakeProcess()

    return Fleet(ClusterConfig(**counts), lambda slot: Configure(config=Config()), launch)


def bring_up(fleet: Fleet) -> None:
    for slot in fleet.start_due(NOW):
        fleet.is_up(slot, NOW, READY)


def names(fleet: Fleet) -> list[str]:
    return [slot.name for slot in fleet]


def named(fleet: Fleet, name: str) -> Slot:
    return next(slot for slot in fleet if slot.name == name)


def let_go(fleet: Fleet, name: str, *, comes_back: bool = False) -> None:
    slot = named(fleet, name)
    fleet.leave(slot, NOW, comes_back=comes_back)
    fleet.end(slot, NOW)


def test_a_new_slot_takes_the_first_name_that_nobody_has() -> None:
    fleet = fleet_of(workers=3)
    bring_up(fleet)
    let_go(fleet, "w1")
    assert names(fleet) == ["w0", "w2"]
    assert [fleet.grow(Role.MIXED).name for _ in range(2)] == ["w1", "w3"]
    assert fleet.grow(Role.PREFILL).name == "p0"


def test_starts_are_counted_over_all_who_had_a_name() -> None:
    fleet = fleet_of(workers=2)
    bring_up(fleet)
    let_go(fleet, "w1")
    fleet.grow(Role.MIXED)
    bring_up(fleet)
    assert named(fleet, "w1").num_starts == 2


@pytest.mark.parametrize("full_step_ns", [None, 250_000_000])
def test_states_of_workers_add_up_but_not_how_long_their_steps_take(
    full_step_ns: int | None,
) -> None:
    fleet = fleet_of(workers=2)
    bring_up(fleet)
    counts = dict.fromkeys(EngineStats.__struct_fields__, 3) | {"full_step_ns": full_step_ns}
    for slot in fleet:
        fleet.heard(slot, NOW, EngineStats(**counts))  # type: ignore[arg-type]
    stats = fleet.stats()
    assert (stats.num_running, stats.num_steps) == (6, 6)
    assert stats.full_step_ns is None


def test_silence_counts_only_while_somebody_listens() -> None:
    fleet = fleet_of(workers=1)
    bring_up(fleet)
    (slot,) = fleet
    limit_ns = round(fleet.config.silence_timeout_s * NS_PER_S)
    fleet.heard(slot, NOW, None)
    assert fleet.silent(Ns(NOW + limit_ns + 1)) == [slot]
    fleet.overslept(9 * NS_PER_S)
    until = Ns(NOW + limit_ns + 9 * NS_PER_S)
    assert fleet.silent(until) == []
    assert fleet.next_ns() == until + 1
    assert fleet.silent(Ns(until + 1)) == [slot]
    fleet.heard(slot, until, None)
    assert fleet.next_ns() == until + limit_ns + 1


def test_the_last_loss_is_known_when_another_one_has_the_name() -> None:
    fleet = fleet_of(workers=1)
    slot = fleet.add_remote(NOW, FakeProcess(), Hello(name="box"))
    assert (slot.cause, slot.fault) == (None, "")
    fleet.lose(slot, NOW, Cause.SILENT, "it has fallen silent")
    slot = fleet.add_remote(NOW, FakeProcess(), Hello(name="box"))
    assert (slot.cause, slot.fault) == (Cause.SILENT, "it has fallen silent")
    assert slot.num_short_lives == 0


def test_a_fleet_whose_workers_all_have_new_names_does_not_grow() -> None:
    """As in one that scales for months, where each machine has a name of its own."""
    fleet = fleet_of(workers=1)

    def come_and_go(name: str) -> tuple[int, dict[Cause, int]]:
        """Starts, and losses of all who had that name."""
        slot = fleet.add_remote(NOW, FakeProcess(), Hello(name=name))
        fleet.lose(slot, NOW, Cause.ENDED, "gone")
        return slot.num_starts, dict(slot.losses)

    def num_objects() -> int:
        """Entries of all that the fleet keeps."""
        return sum(len(kept) for kept in vars(fleet).values() if isinstance(kept, dict | list))

    assert come_and_go("first") == (1, {Cause.ENDED: 1})
    assert come_and_go("first") == (2, {Cause.ENDED: 2})
    for number in range(MAX_GONE - 1):
        come_and_go(f"box{number}")
    assert come_and_go("first") == (3, {Cause.ENDED: 3})  # it is remembered, and the last again
    before = num_objects()
    for number in range(MAX_GONE):
        come_and_go(f"other{number}")
    assert num_objects() == before
    assert come_and_go("first") == (1, {Cause.ENDED: 1})
    assert names(fleet) == ["w0"]


def test_who_comes_back_keeps_the_slot_and_has_another_life() -> None:
    fleet = fleet_of(workers=2)
    bring_up(fleet)
    let_go(fleet, "w0", comes_back=True)
    slot = named(fleet, "w0")
    assert (slot.is_ready, slot.leaving) == (False, None)
    bring_up(fleet)
    assert (slot.worker_id, slot.num_starts) == (WorkerId(2), 2)


def test_who_has_another_role_keeps_the_slot_the_name_and_the_role() -> None:
    fleet = fleet_of(prefill=2, decode=1)
    bring_up(fleet)
    slot = named(fleet, "p0")
    fleet.set_role(slot, Role.DECODE)
    assert slot.worker_id == WorkerId(0)
    fleet.lose(slot, NOW, Cause.ENDED, "struck")
    assert named(fleet, "p0").role is Role.DECODE
    let_go(fleet, "p1", comes_back=True)
    assert [one.role for one in fleet] == [Role.DECODE, Role.PREFILL, Role.DECODE]


def test_who_is_lost_before_it_says_so_begins_in_the_role_that_it_was_asked_for() -> None:
    fleet = fleet_of(prefill=1, decode=1)
    bring_up(fleet)
    slot = named(fleet, "p0")
    fleet.ask_role(slot, Role.DECODE)
    assert (slot.role, slot.next_role) == (Role.PREFILL, Role.DECODE)
    fleet.lose(slot, NOW, Cause.SILENT, "struck")
    assert (slot.role, slot.next_role, slot.asked_role) == (Role.DECODE, Role.DECODE, None)


@pytest.mark.parametrize(("comes_back", "left"), [(False, ["w1"]), (True, ["w0", "w1"])])
def test_who_is_lost_while_it_leaves_has_left(comes_back: bool, left: list[str]) -> None:
    fleet = fleet_of(workers=2)
    bring_up(fleet)
    slot = named(fleet, "w0")
    process = cast("FakeProcess", slot.process)
    fleet.leave(slot, NOW, comes_back=comes_back)
    fleet.lose(slot, NOW, Cause.ENDED, "struck")
    assert process.is_killed
    assert names(fleet) == left


def test_a_fleet_that_has_served_is_not_given_up() -> None:
    fleet = fleet_of(workers=2)
    for served in (False, True):
        for slot in fleet:
            for _ in range(MAX_BAD_STARTS):
                slot.restart_ns = NOW
                fleet.start_due(NOW)
                fleet.lose(slot, NOW, Cause.ENDED, "struck")
        assert fleet.is_hopeless is not served
        for slot in fleet:
            slot.restart_ns = NOW
        bring_up(fleet)
        for slot in fleet:
            fleet.lose(slot, NOW, Cause.ENDED, "struck")


def test_only_processes_that_will_serve_are_starting() -> None:
    fleet = fleet_of(workers=2)
    assert fleet.num_starting == 0
    fleet.start_due(NOW)
    assert fleet.num_starting == 2
    fleet.leave(named(fleet, "w0"), NOW, comes_back=False)
    assert fleet.num_starting == 1
    fleet.is_up(named(fleet, "w1"), NOW, READY)
    assert fleet.num_starting == 0
