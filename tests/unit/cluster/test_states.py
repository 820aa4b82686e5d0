"""What people hear of workers that are not ready."""

import pytest

from headrace.cluster.canary import Canaries
from headrace.cluster.fleet import Cause, Fleet
from headrace.cluster.states import absence, awaited, worker_states
from headrace.cluster.wire import Hello
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from unit.cluster.test_crew import ready
from unit.cluster.test_fleet import NOW, FakeProcess, fleet_of, named


def text_of(fleet: Fleet, canaries: Canaries | None = None) -> str:
    canaries = canaries or Canaries(ClusterConfig(canary=False), lambda slot, asked: None)
    return awaited(worker_states(NOW, fleet, canaries), fleet.config)


def absence_of(fleet: Fleet, *, is_scaled: bool = False) -> str:
    canaries = Canaries(fleet.config, lambda slot, asked: None)
    return absence(NOW, fleet, canaries, is_scaled=is_scaled)


def bring_up(fleet: Fleet) -> None:
    for slot in fleet.start_due(NOW):
        fleet.is_up(slot, NOW, ready())


def test_each_is_named_with_what_it_is_about() -> None:
    fleet = fleet_of(workers=3)
    fleet.start_due(NOW)
    assert text_of(fleet) == "w0 starts, w1 starts, w2 starts"
    for name, stage, done in (("w0", "fetch", 4), ("w1", "load", 1), ("w2", "load", 4)):
        fleet.loads(named(fleet, name), stage, done, 4)
    assert text_of(fleet) == (
        "w0 fetches the model (100%), w1 loads the model (25%), w2 measures what its steps take"
    )
    slot = named(fleet, "w1")
    fleet.loaded(slot, ready())
    fleet.is_up(slot, NOW, ready())
    assert "w1" not in text_of(fleet)


def test_also_while_there_is_no_process() -> None:
    fleet = fleet_of(workers=1, restart_delay_s=8.0)
    fleet.start_due(NOW)
    fleet.lose(named(fleet, "w0"), NOW, Cause.ENDED, "its process has ended, with exit code 1")
    assert text_of(fleet) == "w0 starts in 8 s, its process has ended, with exit code 1"


def test_and_before_a_canary_is_answered() -> None:
    fleet = fleet_of()
    canaries = Canaries(ClusterConfig(canary=True), lambda slot, asked: None)
    slot = fleet.add_remote(NOW, FakeProcess(), Hello(name="box"))
    fleet.loaded(slot, ready())
    assert canaries.begin(NOW, slot, ready())
    assert text_of(fleet, canaries) == "box-0 answers its canary"


def test_who_loads_may_be_silent_for_longer() -> None:
    fleet = fleet_of(workers=1, silence_timeout_s=5.0)
    (slot,) = fleet.start_due(NOW)

    def is_silent(seconds: float) -> bool:
        return slot in fleet.silent(Ns(NOW + round(seconds * NS_PER_S)))

    assert (is_silent(59), is_silent(61)) == (False, True)  # before its first word
    fleet.heard(slot, NOW, None)
    assert (is_silent(29), is_silent(31)) == (False, True)
    fleet.loaded(slot, ready())
    assert (is_silent(4), is_silent(6)) == (False, True)
    fleet.lose(slot, NOW, Cause.SILENT, "it has fallen silent")
    slot.restart_ns = NOW
    fleet.start_due(NOW)
    fleet.heard(slot, NOW, None)
    assert (is_silent(29), is_silent(31)) == (False, True)  # its next life loads again


def test_where_none_has_come_people_hear_how_to_start_one() -> None:
    fleet = fleet_of(workers=0, listen="10.0.0.1:7000")
    hint = "none is there; start one: headrace worker --connect 10.0.0.1:7000 --secret-file FILE"
    assert text_of(fleet) == hint
    assert absence_of(fleet) == f"no worker that decodes is ready: {hint}"
    slot = fleet.add_remote(NOW, FakeProcess(), Hello(name="box"))
    assert absence_of(fleet) == "no worker that decodes is ready: box-0 starts"
    fleet.is_up(slot, NOW, ready())
    assert absence_of(fleet) == ""
    fleet.lose(slot, NOW, Cause.ENDED, "its process has ended")
    assert absence_of(fleet) == f"no worker that decodes is ready: {hint}"


@pytest.mark.parametrize("is_scaled", [False, True])
def test_who_restarts_or_was_lost_is_away_whoever_scales(is_scaled: bool) -> None:
    fleet = fleet_of(workers=1, restart_delay_s=8.0)
    bring_up(fleet)
    slot = named(fleet, "w0")
    assert absence_of(fleet, is_scaled=is_scaled) == ""
    fleet.leave(slot, NOW, comes_back=True)
    assert absence_of(fleet, is_scaled=is_scaled).endswith(": w0 ends what it has begun")
    fleet.end(slot, NOW)
    fleet.start_due(NOW)
    assert absence_of(fleet, is_scaled=is_scaled).endswith(": w0 starts")
    fleet.lose(slot, NOW, Cause.ENDED, "its process has ended")
    assert absence_of(fleet, is_scaled=is_scaled).endswith(
        ": w0 starts in 8 s, its process has ended"
    )


def test_a_pool_that_sleeps_wakes_up_for_whoever_comes() -> None:
    fleet = fleet_of(workers=1)
    bring_up(fleet)
    slot = named(fleet, "w0")
    fleet.leave(slot, NOW, comes_back=False)
    assert absence_of(fleet, is_scaled=True) == ""  # it goes to sleep
    fleet.end(slot, NOW)
    assert absence_of(fleet, is_scaled=True) == ""
    assert absence_of(fleet).endswith("none will be started, so restart the server")
    woken = fleet.grow(Role.MIXED)
    fleet.start_due(NOW)
    assert absence_of(fleet, is_scaled=True) == ""
    # What nobody has asked for yet: it cannot start.
    fleet.lose(woken, NOW, Cause.UNFIT, "it has no such model")
    assert "it has no such model" in absence_of(fleet, is_scaled=True)


def test_who_computes_prompts_alone_is_no_help() -> None:
    fleet = fleet_of(workers=0, prefill=1, decode=1)
    bring_up(fleet)
    fleet.lose(named(fleet, "d0"), NOW, Cause.ENDED, "gone")
    assert absence_of(fleet) == "no worker that decodes is ready: d0 starts in 0 s, gone"
