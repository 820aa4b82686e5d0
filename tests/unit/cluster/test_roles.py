"""Workers that are asked to be for something else: who may be, and when that has come true."""

from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from headrace.cluster.fleet import Slot
from headrace.cluster.roles import SetWorkerRole
from headrace.cluster.wire import (
    Canary,
    Leave,
    RoleIs,
    RoleSettled,
    RoleVote,
    RoleWanted,
    SetRole,
)
from headrace.core.base.errors import OverloadError, RequestError
from headrace.core.base.worker import Role
from headrace.core.router.events import WorkerRole, WorkerUp
from unit.cluster.test_crew import Rig, Voice, ready


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.crew.end()


def serve(rig: Rig, role: Role) -> tuple[Slot, Voice]:
    slot, voice = rig.come(role)
    rig.say(slot, ready(role=role))
    return slot, voice


def ask(rig: Rig, name: str, role: Role) -> Future[None]:
    done: Future[None] = Future()
    rig.crew.roles.ask(SetWorkerRole(name, role, done))
    return done


def asked(voice: Voice) -> list[Role]:
    return [message.role for message in voice.sent if isinstance(message, SetRole)]


def test_it_has_the_role_when_it_says_so(rig: Rig) -> None:
    (slot, voice), _ = serve(rig, Role.PREFILL), serve(rig, Role.DECODE)
    done = ask(rig, "box-0", Role.DECODE)
    assert asked(voice) == [Role.DECODE]
    assert (slot.role, done.done()) == (Role.PREFILL, False)
    rig.say(slot, RoleIs(Role.DECODE))
    assert done.result(0) is None
    assert slot.role is Role.DECODE
    assert slot.worker_id is not None
    assert rig.roles[-1] == WorkerRole(slot.worker_id, Role.DECODE)


def test_what_another_front_end_has_asked_for_counts_here_too(rig: Rig) -> None:
    slot, _ = serve(rig, Role.PREFILL)
    mine = ask(rig, "box-0", Role.DECODE)
    rig.say(slot, RoleIs(Role.MIXED))  # it was asked for that before
    assert (slot.role, mine.done()) == (Role.MIXED, False)
    rig.say(slot, RoleIs(Role.DECODE))
    assert (slot.role, mine.done()) == (Role.DECODE, True)


def test_who_comes_with_another_role_than_it_said_first_has_that(rig: Rig) -> None:
    """Its role has changed between its first word and its being ready."""
    slot, _ = rig.come(Role.PREFILL)
    rig.say(slot, ready(role=Role.DECODE))
    (up,) = rig.roles
    assert isinstance(up, WorkerUp)
    assert (slot.role, up.role) == (Role.DECODE, Role.DECODE)


def test_and_who_says_so_before_its_canary_is_answered() -> None:
    rig = Rig(canary=True)
    slot, voice = rig.come(Role.PREFILL)
    rig.say(slot, ready(role=Role.PREFILL))
    assert any(isinstance(message, Canary) for message in voice.sent)
    rig.say(slot, RoleIs(Role.DECODE))
    assert rig.roles == []
    rig.answer(slot, 7, 7, 7, 7)
    (up,) = rig.roles
    assert isinstance(up, WorkerUp)
    assert up.role is Role.DECODE
    rig.crew.end()


@pytest.mark.parametrize(
    ("name", "role", "status", "text"),
    [
        ("box-7", Role.DECODE, 404, "no worker 'box-7'"),
        ("box-1", Role.PREFILL, 409, "the last one that decodes"),
        ("box-2", Role.DECODE, 409, "is not ready"),
    ],
)
def test_what_cannot_be_is_refused(rig: Rig, name: str, role: Role, status: int, text: str) -> None:
    _, (_, last), (_, young) = serve(rig, Role.PREFILL), serve(rig, Role.DECODE), rig.come()
    error = ask(rig, name, role).exception(0)
    assert isinstance(error, RequestError)
    assert (error.status_hint, text in error.message) == (status, True)
    assert asked(last) == asked(young) == []


def test_of_two_that_decode_only_one_may_stop(rig: Rig) -> None:
    """Also when the other one has not answered yet."""
    for _ in range(2):
        serve(rig, Role.DECODE)
    assert not ask(rig, "box-0", Role.PREFILL).done()
    error = ask(rig, "box-1", Role.PREFILL).exception(0)
    assert isinstance(error, RequestError)
    assert error.status_hint == 409


def test_what_it_was_asked_for_last_counts_until_it_has_answered_that() -> None:
    rig = Rig()
    slots = [serve(rig, Role.DECODE)[0] for _ in range(2)]
    first, last = ask(rig, "box-0", Role.MIXED), ask(rig, "box-0", Role.PREFILL)
    rig.say(slots[0], RoleIs(Role.MIXED))
    assert (first.done(), last.done()) == (True, False)
    assert slots[0].next_role is Role.PREFILL
    # So the other one is the last that decodes.
    error = ask(rig, "box-1", Role.PREFILL).exception(0)
    assert isinstance(error, RequestError)
    rig.say(slots[0], RoleIs(Role.PREFILL))
    assert (slots[0].role, slots[0].asked_role, last.done()) == (Role.PREFILL, None, True)
    rig.crew.end()


def test_who_leaves_keeps_its_role(rig: Rig) -> None:
    slot, _ = serve(rig, Role.DECODE)
    rig.fleet.leave(slot, rig.now, comes_back=True)
    error = ask(rig, "box-0", Role.MIXED).exception(0)
    assert isinstance(error, RequestError)
    assert "is leaving" in error.message
    rig.crew.listen(rig.now, [])
    rig.roles.clear()
    rig.say(slot, RoleIs(Role.MIXED))
    assert rig.roles == []


def test_who_is_lost_over_it_may_come_again_as_it_was(rig: Rig) -> None:
    slot, _ = serve(rig, Role.DECODE)
    done = ask(rig, "box-0", Role.MIXED)
    rig.wait(5.0)  # in silence
    assert isinstance(done.exception(0), OverloadError)
    assert list(rig.fleet) == []
    assert slot.worker_id is None


def test_but_a_worker_of_this_machine_begins_again_as_it_was_to_be() -> None:
    rig = Rig(workers=1)
    rig.wait(0)
    (slot,) = rig.fleet
    rig.say(slot, ready())
    done = ask(rig, "w0", Role.DECODE)
    rig.wait(5.0)
    assert done.result(0) is None
    assert slot.role is Role.DECODE
    rig.crew.end()


def test_a_worker_that_is_asked_to_leave_ends_as_it_is(rig: Rig) -> None:
    slot, _ = serve(rig, Role.DECODE)
    rig.say(slot, Leave(10.0))
    assert slot.leaving is not None
    assert slot.leaving.comes_back is False


def votes(voice: Voice) -> list[RoleVote]:
    return [message for message in voice.sent if isinstance(message, RoleVote)]


def test_it_agrees_to_what_another_front_end_wants_while_somebody_is_left(rig: Rig) -> None:
    (first, one), (second, two) = serve(rig, Role.DECODE), serve(rig, Role.MIXED)
    rig.say(first, RoleWanted(7, Role.PREFILL))
    assert votes(one) == [RoleVote(7, agrees=True)]
    rig.say(second, RoleWanted(3, Role.PREFILL))
    assert votes(two) == [RoleVote(3, agrees=False)]
    error = ask(rig, "box-1", Role.PREFILL).exception(0)
    assert isinstance(error, RequestError)
    # It may do without the second one after all, since the first one stays.
    rig.say(first, RoleSettled(7, Role.PREFILL, is_so=False))
    rig.say(second, RoleWanted(4, Role.PREFILL))
    assert votes(two)[1:] == [RoleVote(4, agrees=True)]


def test_what_it_wants_itself_counts_before_it_is_so(rig: Rig) -> None:
    serve(rig, Role.DECODE)
    slot, voice = serve(rig, Role.DECODE)
    mine = ask(rig, "box-0", Role.PREFILL)
    rig.say(slot, RoleWanted(0, Role.PREFILL))
    assert votes(voice) == [RoleVote(0, agrees=False)]
    assert not mine.done()


def test_who_leaves_anyway_may_be_anything(rig: Rig) -> None:
    slot, voice = serve(rig, Role.DECODE)
    rig.fleet.leave(slot, rig.now, comes_back=False)
    rig.say(slot, RoleWanted(0, Role.PREFILL))
    assert votes(voice) == [RoleVote(0, agrees=True)]


@pytest.mark.parametrize(
    ("is_overtaken", "text"), [(False, "for another front end"), (True, "something else")]
)
def test_what_another_front_end_refuses_is_told(rig: Rig, is_overtaken: bool, text: str) -> None:
    slot, _ = serve(rig, Role.DECODE)
    serve(rig, Role.DECODE)
    done = ask(rig, "box-0", Role.PREFILL)
    rig.say(slot, RoleSettled(0, Role.PREFILL, is_so=False, is_overtaken=is_overtaken))
    error = done.exception(0)
    assert isinstance(error, RequestError)
    assert (error.status_hint, text in error.message) == (409, True)
    assert slot.next_role is Role.DECODE
    assert not ask(rig, "box-1", Role.PREFILL).done()
