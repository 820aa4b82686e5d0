"""Whether a worker may be for something else, as all the front ends that it works for see it.

A front end knows which of its workers decode, and nothing of what others ask for meanwhile. So a
worker that is to stop decoding asks all of them first. Who says yes counts it as one that does not
decode until that is settled, so two workers cannot both stop as the last but one. Decides what the
worker is for; refuses to know who else decodes. Pure; belongs to the engine's thread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from headrace.cluster.wire import RoleIs, RoleSettled, RoleWanted
from headrace.core.base.worker import Role

Voter = TypeVar("Voter")
Said = RoleIs | RoleWanted | RoleSettled

DECODING: Final = (Role.MIXED, Role.DECODE)


@dataclass(slots=True)
class _Question(Generic[Voter]):
    vote_id: int
    role: Role
    asker: Voter
    waits_for: list[Voter]  # for their word


class RoleBallot(Generic[Voter]):
    """`tell` is told what each front end is to hear. There is one question at a time."""

    def __init__(self, role: Role, tell: Callable[[Voter, Said], None]) -> None:
        self.role = role
        self._tell = tell
        self._voters: list[Voter] = []
        self._next_vote_id = 0
        self._question: _Question[Voter] | None = None

    def join(self, voter: Voter) -> None:
        """It has been told what the worker is for."""
        self._voters.append(voter)
        if self._question is not None:
            self._question.waits_for.append(voter)
            self._tell(voter, RoleWanted(self._question.vote_id, self._question.role))

    def leave(self, voter: Voter) -> None:
        """Idempotent. What it has asked for, nobody wants any more."""
        self._voters = [one for one in self._voters if one is not voter]
        question = self._question
        if question is None:
            return
        if question.asker is voter:
            self._settle(is_so=False, is_overtaken=True)
        else:
            self._agree(question, voter)

    def ask(self, voter: Voter, role: Role) -> None:
        """This front end wants it to be for that."""
        if self._question is not None and self._question.role is role:
            return  # it will hear what comes of it
        if self._question is not None:
            self._settle(is_so=False, is_overtaken=True)
        if role in DECODING or self.role not in DECODING:
            self._set(role)
            return
        self._question = _Question(self._next_vote_id, role, voter, [*self._voters])
        self._next_vote_id += 1
        for one in self._voters:
            self._tell(one, RoleWanted(self._question.vote_id, role))

    def hear(self, voter: Voter, vote_id: int, *, agrees: bool) -> None:
        question = self._question
        if question is None or question.vote_id != vote_id:
            return  # that has been settled
        if agrees:
            self._agree(question, voter)
        else:
            self._settle(is_so=False)

    def _agree(self, question: _Question[Voter], voter: Voter) -> None:
        question.waits_for = [one for one in question.waits_for if one is not voter]
        if not question.waits_for:
            self._set(question.role)
            self._settle(is_so=True)

    def _set(self, role: Role) -> None:
        self.role = role
        for voter in self._voters:
            self._tell(voter, RoleIs(role))

    def _settle(self, *, is_so: bool, is_overtaken: bool = False) -> None:
        question, self._question = self._question, None
        assert question is not None
        for voter in self._voters:
            self._tell(voter, RoleSettled(question.vote_id, question.role, is_so, is_overtaken))
