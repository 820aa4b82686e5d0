"""Who is let in beside others, and what those hear that came by themselves."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from headrace.cluster.crew import Crew
from headrace.cluster.fleet import Fleet, Slot
from headrace.cluster.rolling import RollingRestart
from headrace.cluster.wire import (
    PROTOCOL,
    Beat,
    Canaried,
    Canary,
    Configure,
    Dismiss,
    FromWorker,
    Hello,
    Ready,
    Renew,
    SendSnapshot,
    Snapshot,
    Unfit,
    decode_from_worker,
    encode,
    up_of,
)
from headrace.core.base.errors import ConfigError
from headrace.core.base.types import NS_PER_S, Ns, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.ledger import ByteLedger, KvPlan
from headrace.core.config.schema import Config, DeviceConfig
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.router.events import WorkerKvSnapshot, WorkerRole, WorkerUp
from headrace.core.router.front_events import FrontEvent
from headrace.models.load import ModelDescription
from support.routing import spec
from unit.cluster.test_fleet import FakeProcess


class Voice(FakeProcess):
    """A worker of another machine: `words` is what it says next."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[FromWorker] = []
        self.is_closed = False

    def receive(self) -> list[FromWorker]:
        words, self.words = self.words, []
        return [decode_from_worker(encode(word)) for word in words]

    def fileno(self) -> int:
        return -1

    def kill(self) -> None:
        self.is_closed = True


class Rig:
    def __init__(self, *, canary: bool = False, workers: int = 0) -> None:
        self.now_s = 100.0
        self.num_up = 0
        self.snapshots: list[WorkerKvSnapshot] = []
        self.roles: list[WorkerUp | WorkerRole] = []
        self.fleet = Fleet(
            ClusterConfig(silence_timeout_s=4.0, canary=canary, workers=workers),
            lambda slot: Configure(config=Config()),
            lambda slot: Voice(),
        )
        self.crew = Crew(
            self.fleet, None, self._hear, None,
            num_at=lambda worker_id: 0, drain_timeout_s=1.0, renew_s=2.0,
        )  # fmt: skip
        # Nobody has a socket here.
        self.crew.switchboard.follow = lambda now, slots, door: None  # type: ignore[method-assign]

    def come(self, role: Role = Role.MIXED) -> tuple[Slot, Voice]:
        voice = Voice()
        return self.fleet.add_remote(self.now, voice, Hello(name="box", role=role)), voice

    def answer(self, slot: Slot, *tokens: int) -> None:
        """To the canary that it has got last."""
        voice = slot.process
        assert isinstance(voice, Voice)
        asked = [message for message in voice.sent if isinstance(message, Canary)][-1]
        self.say(slot, Canaried(asked.canary_id, tokens, (0.0,) * len(tokens)))

    def say(self, slot: Slot, *words: FromWorker) -> None:
        voice = slot.process
        assert isinstance(voice, Voice)
        voice.words += words
        self.crew.listen(self.now, [slot])
        self.crew.settle(is_starting=True)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.crew.listen(self.now, [])
        self.crew.settle(is_starting=True)

    @property
    def now(self) -> Ns:
        return Ns(round(self.now_s * NS_PER_S))

    def _hear(self, event: FrontEvent) -> None:
        self.num_up += isinstance(event, WorkerUp)
        if isinstance(event, WorkerUp | WorkerRole):
            self.roles.append(event)
        if isinstance(event, WorkerKvSnapshot):
            self.snapshots.append(event)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.crew.end()


@pytest.fixture
def wary() -> Iterator[Rig]:
    """One whose workers have to answer canaries; it starts three."""
    rig = Rig(canary=True, workers=3)
    rig.wait(0)
    yield rig
    rig.crew.end()


def ready(**fields: Any) -> Ready:
    protocol = fields.pop("protocol", PROTOCOL)
    role = fields.pop("role", Role.MIXED)
    return Ready(
        protocol=protocol,
        pid=1,
        role=role,
        spec=spec(**fields),
        config=Config(),
        kv=KvPlan(
            num_blocks=1,
            block_size=16,
            block_bytes=1,
            max_model_len=1,
            reason="",
            ledger=ByteLedger(available=100),
        ),
        kv_address="",
        cost=FittedCostModel.prior(),
        description=ModelDescription(
            name="", architecture="", num_parameters=1, weight_types="", file_bytes=1
        ),
    )


def test_workers_are_as_fast_as_others_of_their_machine_with_as_many_threads() -> None:
    def machine(kv_address: str, threads: int) -> str:
        config = replace(Config(), device=DeviceConfig(threads=threads))
        told = msgspec.structs.replace(ready(), kv_address=kv_address, config=config)
        return up_of(WorkerId(0), "w", told).machine

    one = machine("shm:boot-a:1:2:3:4", 2)
    assert one == machine("shm:boot-a:5:6:7:8|tcp:4:7000:10.0.0.1", 2)
    assert len({one, machine("shm:boot-b:1:2:3:4", 2), machine("shm:boot-a:1:2:3:4", 1)}) == 3
    assert machine("", 2) == ""


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        (
            {"model_digest": "another"},
            "it serves model and arithmetic another (auto activations, auto attention) with KV",
        ),
        ({"kv_dtype": "int8"}, "with KV in int8, blocks of 16 tokens, the others"),
        ({"block_size": 32}, "blocks of 32 tokens, the others"),
        ({"protocol": PROTOCOL - 1}, f"it speaks protocol {PROTOCOL - 1}, not {PROTOCOL}"),
        ({"protocol": PROTOCOL + 1}, f"it speaks protocol {PROTOCOL + 1}, not {PROTOCOL}"),
    ],
)
def test_whoever_could_not_take_over_is_not_let_in(
    rig: Rig, fields: dict[str, Any], fault: str
) -> None:
    first, _ = rig.come()
    rig.say(first, ready())
    other, voice = rig.come()
    rig.say(other, ready(**fields))
    (dismissal,) = [message for message in voice.sent if isinstance(message, Dismiss)]
    assert fault in dismissal.reason
    assert voice.is_closed
    assert rig.num_up == 1
    assert list(rig.fleet) == [first]


def test_pools_of_another_size_are_let_in(rig: Rig) -> None:
    for num_blocks in (1024, 7):
        slot, _ = rig.come()
        rig.say(slot, ready(num_blocks=num_blocks))
    assert rig.num_up == 2


def test_workers_of_other_machines_hear_that_somebody_is_there(rig: Rig) -> None:
    slot, voice = rig.come()
    rig.wait(2.0)
    before = voice.sent.count(Renew())
    for _ in range(8):
        rig.say(slot, Beat())
        rig.wait(0.5)
    assert voice.sent.count(Renew()) - before == 2
    due_ns = rig.crew.next_ns()
    assert due_ns is not None
    assert due_ns <= rig.now + 2 * NS_PER_S


def test_nobody_is_woken_for_workers_that_are_not_there(rig: Rig) -> None:
    rig.wait(2.0)
    assert rig.crew.next_ns() is None


def test_whoever_comes_again_has_its_name_again(rig: Rig) -> None:
    """So that a breaker knows it, and figures do not grow with each return."""
    first, voice = rig.come()
    second, _ = rig.come()
    assert [first.name, second.name] == ["box-0", "box-1"]
    rig.say(first, ready())
    rig.wait(60.0)  # silence
    assert voice.is_closed
    again, _ = rig.come()
    assert (again.name, again.num_starts) == ("box-0", 2)


def test_a_snapshot_in_parts_is_told_when_it_is_whole(rig: Rig) -> None:
    slot, _ = rig.come()
    rig.say(slot, ready(num_blocks=3))
    rig.say(slot, Snapshot(7, (b"a", b"b"), is_last=False))
    assert not rig.snapshots
    rig.say(slot, Beat(), Snapshot(7, (b"c",)))
    rig.say(slot, Snapshot(9, (b"d",)))
    assert [(one.seq_no, one.names) for one in rig.snapshots] == [
        (7, (b"a", b"b", b"c")),
        (9, (b"d",)),
    ]


def test_a_worker_has_no_more_blocks_than_it_said(rig: Rig) -> None:
    slot, voice = rig.come()
    rig.say(slot, ready(num_blocks=3))
    rig.say(slot, *[Snapshot(7, (b"a", b"b"), is_last=False)] * 2)
    assert voice.is_closed
    assert "more than the 3 blocks" in slot.fault


def test_nobody_gets_requests_before_its_canary_is_answered(wary: Rig) -> None:
    first, second, third = wary.fleet
    for slot in (first, second, third):
        wary.say(slot, ready())
    assert (wary.num_up, wary.fleet.num_starting) == (0, 3)
    wary.answer(first, 1, 2)
    wary.answer(second, 1, 2)
    assert wary.num_up == 2
    process = first.process
    assert isinstance(process, Voice)
    assert process.sent[-1] == SendSnapshot()  # what it has cached meanwhile was not told
    wary.answer(third, 1, 3)
    assert wary.num_up == 2
    assert third.process is None
    assert third.fault == "its canary is wrong: token 1 of its answer is 3, and 2 of the others'"
    assert third.losses == {"canary_wrong": 1}
    assert wary.fleet.restart_in_s(third, wary.now) == 0.5
    for _ in range(2):  # later and later, as after any life that was short
        wary.wait(1.0)
        wary.say(third, ready())
        wary.answer(third, 1, 3)
    assert wary.fleet.restart_in_s(third, wary.now) == 2.0


def test_two_kinds_that_come_together_do_not_both_serve(wary: Rig) -> None:
    first, *others = wary.fleet
    wary.say(first, ready())
    for other in others:
        wary.say(other, ready(model_digest="another"))
    wary.answer(first, 1)
    for other in others:  # another model's answer is another one
        wary.answer(other, 2)
        assert "model and arithmetic another" in other.fault
    assert wary.num_up == 1
    assert first.is_ready  # and no majority of others makes it wrong


def serving(rig: Rig) -> list[Slot]:
    for slot in rig.fleet:
        rig.say(slot, ready())
        rig.answer(slot, 1)
    return list(rig.fleet)


def test_a_rolling_restart_stops_at_the_first_canary_that_fails(
    wary: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = serving(wary)
    rolling = RollingRestart(wary.crew)
    rolling.begin()

    def turn() -> None:
        rolling.turn()
        wary.wait(1.5)  # longer than a drain
        for slot in wary.fleet:
            if slot.is_ready:
                wary.say(slot, Beat())

    turn()
    turn()
    wary.say(first, ready())
    assert [slot.num_starts for slot in wary.fleet] == [2, 1, 1]
    wary.answer(first, 1)
    turn()
    turn()
    wary.say(second, ready())
    wary.answer(second, 9)
    for _ in range(3):
        turn()
    assert "has stopped at worker w1 (its canary is wrong" in caplog.text
    assert "has ended in" not in caplog.text
    assert "not restarted: 1" in caplog.text
    # It comes back in the end, and the third one keeps its life all the same.
    wary.say(second, ready())
    wary.answer(second, 1)
    for _ in range(3):
        turn()
    assert all(slot.is_ready for slot in wary.fleet)
    assert third.num_starts == 1


def test_a_rolling_restart_without_a_fault_comes_to_everybody(wary: Rig) -> None:
    serving(wary)
    rolling = RollingRestart(wary.crew)
    rolling.begin()
    for _ in range(12):
        rolling.turn()
        wary.wait(1.5)
        for slot in wary.fleet:
            if slot.is_ready:
                wary.say(slot, Beat())
            elif slot.process is not None:
                wary.say(slot, ready())
                wary.answer(slot, 1)
    assert [slot.num_starts for slot in wary.fleet] == [2, 2, 2]


def test_one_of_another_machine_that_cannot_serve_keeps_nobody_else_from_it(rig: Rig) -> None:
    bad, _ = rig.come()
    good, _ = rig.come()
    rig.say(bad, Unfit("there is no such file"))
    assert not rig.crew.start.done()
    rig.say(good, ready())
    assert rig.crew.start.result(0) == [ready()]


def test_nobody_waits_for_a_start_where_all_that_came_cannot_serve(rig: Rig) -> None:
    slot, _ = rig.come()
    rig.say(slot, Unfit("there is no such file"))
    with pytest.raises(ConfigError, match="there is no such file"):
        rig.crew.start.result(0)


def test_a_start_does_not_wait_for_one_of_another_machine_that_says_nothing(rig: Rig) -> None:
    good, _ = rig.come()
    rig.come()
    rig.say(good, ready())
    rig.wait(3.9)
    rig.say(good, Beat(None, 0))
    assert not rig.crew.start.done()
    rig.wait(0.2)
    assert rig.crew.start.result(0) == [ready()]


def test_why_a_worker_is_lost_is_one_line(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    slot, _ = rig.come()
    rig.say(slot, ready())
    rig.say(rig.come()[0], ready(kv_dtype="\x1b[2J" + "f16\n" * 1000))
    (line,) = [record.message for record in caplog.records if "is lost" in record.message]
    assert line.startswith("worker box-1 is lost: it serves model and arithmetic")
    assert line.isprintable()
    assert len(line) < 600
