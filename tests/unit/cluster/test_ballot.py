"""What a worker is for, where several front ends have a say in it."""

from headrace.cluster.ballot import RoleBallot, Said
from headrace.cluster.wire import RoleIs, RoleSettled, RoleWanted
from headrace.core.base.worker import Role

A, B, C = "a", "b", "c"


class Vote:
    def __init__(self, *voters: str, role: Role = Role.DECODE) -> None:
        self.heard: list[tuple[str, Said]] = []
        self.ballot = RoleBallot[str](role, lambda voter, said: self.heard.append((voter, said)))
        for voter in voters:
            self.ballot.join(voter)

    def take(self) -> list[tuple[str, Said]]:
        heard, self.heard = self.heard, []
        return heard


def each(said: Said, *voters: str) -> list[tuple[str, Said]]:
    return [(voter, said) for voter in voters]


IS_PREFILL = RoleIs(Role.PREFILL)
AGREED = RoleSettled(0, Role.PREFILL, is_so=True)
REFUSED = RoleSettled(0, Role.PREFILL, is_so=False)
OVERTAKEN = RoleSettled(0, Role.PREFILL, is_so=False, is_overtaken=True)


def test_whoever_decodes_from_then_on_need_not_ask() -> None:
    vote = Vote(A, B, role=Role.PREFILL)
    vote.ballot.ask(B, Role.MIXED)
    vote.ballot.ask(B, Role.DECODE)
    assert vote.take() == [*each(RoleIs(Role.MIXED), A, B), *each(RoleIs(Role.DECODE), A, B)]


def test_all_have_to_agree_and_whoever_asks_as_well() -> None:
    vote = Vote(A, B, C)
    vote.ballot.ask(B, Role.PREFILL)
    assert vote.take() == each(RoleWanted(0, Role.PREFILL), A, B, C)
    vote.ballot.hear(A, 0, agrees=True)
    vote.ballot.hear(A, 0, agrees=True)  # which does not count twice
    vote.ballot.hear(B, 0, agrees=True)
    assert (vote.take(), vote.ballot.role) == ([], Role.DECODE)
    vote.ballot.hear(C, 0, agrees=True)
    assert vote.take() == [*each(IS_PREFILL, A, B, C), *each(AGREED, A, B, C)]


def test_one_is_enough_to_refuse() -> None:
    vote = Vote(A, B, C)
    vote.ballot.ask(B, Role.PREFILL)
    vote.take()
    vote.ballot.hear(A, 0, agrees=False)
    assert vote.take() == each(REFUSED, A, B, C)
    vote.ballot.hear(C, 0, agrees=True)  # late
    assert (vote.take(), vote.ballot.role) == ([], Role.DECODE)
    vote.ballot.ask(B, Role.PREFILL)
    assert vote.take() == each(RoleWanted(1, Role.PREFILL), A, B, C)


def test_who_wants_the_same_is_asked_once() -> None:
    vote = Vote(A, B)
    vote.ballot.ask(A, Role.PREFILL)
    vote.take()
    vote.ballot.ask(B, Role.PREFILL)
    assert vote.take() == []


def test_what_is_wanted_last_counts() -> None:
    vote = Vote(A, B)
    vote.ballot.ask(A, Role.PREFILL)
    vote.take()
    vote.ballot.ask(B, Role.MIXED)
    assert vote.take() == [*each(OVERTAKEN, A, B), *each(RoleIs(Role.MIXED), A, B)]


def test_who_is_gone_is_not_waited_for_and_wants_nothing() -> None:
    vote = Vote(A, B)
    vote.ballot.ask(A, Role.PREFILL)
    vote.ballot.hear(A, 0, agrees=True)
    vote.take()
    vote.ballot.leave(B)
    vote.ballot.leave(B)
    assert vote.take() == [(A, IS_PREFILL), (A, AGREED)]
    vote = Vote(A, B)
    vote.ballot.ask(A, Role.PREFILL)
    vote.take()
    vote.ballot.leave(A)
    assert vote.take() == [(B, OVERTAKEN)]


def test_who_comes_meanwhile_is_asked_too() -> None:
    vote = Vote(A)
    vote.ballot.ask(A, Role.PREFILL)
    vote.ballot.join(C)
    assert vote.take() == each(RoleWanted(0, Role.PREFILL), A, C)
    vote.ballot.hear(A, 0, agrees=True)
    assert vote.take() == []
    vote.ballot.hear(C, 0, agrees=True)
    assert vote.take() == [*each(IS_PREFILL, A, C), *each(AGREED, A, C)]
