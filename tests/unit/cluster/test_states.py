"""What people hear of workers that are not ready."""

from headrace.cluster.canary import Canaries
from headrace.cluster.fleet import Cause, Fleet
from headrace.cluster.states import awaited, worker_states
from headrace.cluster.wire import Hello
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.config.cluster import ClusterConfig
from unit.cluster.test_crew import ready
from unit.cluster.test_fleet import NOW, FakeProcess, fleet_of, named


def text_of(fleet: Fleet, canaries: Canaries | None = None) -> str:
    canaries = canaries or Canaries(ClusterConfig(canary=False), lambda slot, asked: None)
    return awaited(worker_states(NOW, fleet, canaries))


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
