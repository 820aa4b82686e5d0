"""Workers that are asked to be for something else while they run.

Decides whether a worker may be asked, and whether it may do what another front end asks; what it is
for from then on is its own word, so that all its front ends agree. Belongs to the crew's thread.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from headrace.cluster.ballot import DECODING
from headrace.cluster.fleet import Fleet, Slot
from headrace.cluster.returns import FLEET
from headrace.cluster.wire import RoleIs, RoleSettled, RoleVote, RoleWanted, SetRole, ToWorker
from headrace.core.base.errors import OverloadError, RequestError
from headrace.core.base.worker import Role
from headrace.core.router.events import WorkerRole
from headrace.core.router.front_events import FrontEvent

OPERATOR: Final = "an operator"
AUTOSCALER: Final = "the autoscaler"
RETRY_AFTER_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class SetWorkerRole:
    """An operator's wish; `done` hears when it has come true, or why it cannot: RequestError, or
    OverloadError where the worker was lost over it.
    """

    name: str
    role: Role
    done: Future[None]


class RoleChanges:
    def __init__(
        self,
        fleet: Fleet,
        send: Callable[[Slot, ToWorker], None],
        handle: Callable[[FrontEvent], None],
    ) -> None:
        self._fleet = fleet
        self._send = send
        self._handle = handle
        self._waiting: list[tuple[Slot, SetWorkerRole]] = []  # for the worker's word
        self._promised: set[tuple[str, int]] = set()  # names of workers that may stop decoding
        self._begun: set[str] = set()  # names of those that may in any case
        self._asked: dict[str, tuple[Role, str, float]] = {}  # for what, by whom, when: by name

    def ask(self, wish: SetWorkerRole) -> None:
        try:
            slot = self._find(wish)
        except RequestError as error:
            wish.done.set_exception(error)
            return
        self._waiting.append((slot, wish))
        self._begin(slot, wish.role, OPERATOR)

    def begin(self, slot: Slot, role: Role, who: str) -> None:
        """For whoever knows that it may be."""
        self._begun.add(slot.name)
        self._begin(slot, role, who)

    def _begin(self, slot: Slot, role: Role, who: str) -> None:
        self._asked[slot.name] = role, who, time.monotonic()
        self._fleet.ask_role(slot, role)
        self._send(slot, SetRole(role))

    def hear(self, slot: Slot, word: RoleIs | RoleWanted | RoleSettled) -> None:
        match word:
            case RoleIs(role):
                self._is(slot, role)
            case RoleWanted(vote_id, role):
                agrees = self._may_stop(slot, role)
                if agrees:
                    self._promised.add((slot.name, vote_id))
                self._send(slot, RoleVote(vote_id, agrees))
            case RoleSettled(vote_id, role, is_so):
                self._promised.discard((slot.name, vote_id))
                if not is_so:
                    self._is_not(slot, role, is_overtaken=word.is_overtaken)

    def _may_stop(self, slot: Slot, role: Role) -> bool:
        is_free = slot.leaving is not None or slot.name in self._begun
        return is_free or not self._would_leave_nobody(slot, role)

    def _is_not(self, slot: Slot, role: Role, *, is_overtaken: bool) -> None:
        if slot.asked_role is role:
            self._fleet.ask_role(slot, None)
        for wish in self._take(slot, lambda wish: wish.role is role):
            wish.done.set_exception(_refused(slot, is_overtaken=is_overtaken))

    def _is(self, slot: Slot, role: Role) -> None:
        """Whichever front end has asked for it. Who leaves gets nothing more, whatever it is for;
        should it come back, it does as it was.
        """
        if slot.leaving is not None:
            return
        self._tell(slot, role)
        self._fleet.set_role(slot, role)
        if slot.asked_role is None:
            self._begun.discard(slot.name)
        if slot.worker_id is not None:
            self._handle(WorkerRole(slot.worker_id, role))
        for wish in self._take(slot, lambda wish: wish.role is role):
            wish.done.set_result(None)

    def _tell(self, slot: Slot, role: Role) -> None:
        """People, where it is for something else from now on."""
        asked, who, asked_s = self._asked.get(slot.name, (None, "", 0.0))
        why = "another front end has asked"
        if asked is role:
            del self._asked[slot.name]
            why = f"{who} has asked, {time.monotonic() - asked_s:.1f} s ago"
        if role is not slot.role:
            FLEET.info("worker %s is for %s now, not for %s: %s", slot.name, role, slot.role, why)

    def lose(self, slot: Slot) -> None:
        """A worker of this front end begins again, as what it was to be; others may not."""
        self._promised = {promise for promise in self._promised if promise[0] != slot.name}
        self._begun.discard(slot.name)
        self._asked.pop(slot.name, None)
        comes_again = any(slot is one for one in self._fleet)
        for wish in self._take(slot, lambda wish: True):
            if comes_again:
                wish.done.set_result(None)
            else:
                reason = f"worker {slot.name} was lost before it answered"
                wish.done.set_exception(OverloadError(reason, retry_after_s=RETRY_AFTER_S))

    def _take(self, slot: Slot, is_wanted: Callable[[SetWorkerRole], bool]) -> list[SetWorkerRole]:
        waiting, self._waiting = self._waiting, []
        taken = []
        for one, wish in waiting:
            if one is slot and is_wanted(wish):
                taken.append(wish)
            else:
                self._waiting.append((one, wish))
        return taken

    def _find(self, wish: SetWorkerRole) -> Slot:
        """The worker that is meant. RequestError where it cannot be for that."""
        slots = {slot.name: slot for slot in self._fleet}
        slot = slots.get(wish.name)
        if slot is None:
            raise RequestError(
                f"there is no worker {wish.name[:64]!r}",
                status_hint=404,
                code="not_found",
                hint=f"one of {', '.join(slots)}" if slots else "",
            )
        if not slot.is_ready or slot.leaving is not None:
            state = "is leaving" if slot.leaving is not None else "is not ready"
            raise _conflict(f"worker {slot.name} {state}")
        if self._would_leave_nobody(slot, wish.role):
            raise _conflict(
                f"worker {slot.name} is the last one that decodes",
                hint="let another one decode first",
            )
        return slot

    def _would_leave_nobody(self, slot: Slot, role: Role) -> bool:
        """Whether nobody would decode if it were for that: nobody who does so by now, and is not
        asked to stop.
        """
        promised = {name for name, _ in self._promised}
        return role not in DECODING and not any(
            other.is_ready
            and other.leaving is None
            and other.role in DECODING
            and other.next_role in DECODING
            and other.name not in promised
            for other in self._fleet
            if other is not slot
        )


def _refused(slot: Slot, *, is_overtaken: bool) -> RequestError:
    if is_overtaken:
        return _conflict(f"worker {slot.name} is asked for something else by now")
    return _conflict(
        f"worker {slot.name} is the last one that decodes for another front end",
        hint="let another one decode first, or ask again where that one was about to stop, too",
    )


def _conflict(message: str, hint: str = "") -> RequestError:
    return RequestError(message, status_hint=409, code="conflict", hint=hint)
