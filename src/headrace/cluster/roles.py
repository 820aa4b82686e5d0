"""Workers that are asked to be for something else while they run.

Decides whether a worker may be asked; what it is for from then on is its own word, so that all its
front ends agree. Belongs to the crew's thread.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from headrace.cluster.fleet import Fleet, Slot
from headrace.cluster.wire import SetRole, ToWorker
from headrace.core.base.errors import OverloadError, RequestError
from headrace.core.base.worker import Role

DECODING: Final = (Role.MIXED, Role.DECODE)
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
    def __init__(self, fleet: Fleet, send: Callable[[Slot, ToWorker], None]) -> None:
        self._fleet = fleet
        self._send = send
        self._waiting: list[tuple[Slot, SetWorkerRole]] = []  # for the worker's word

    def ask(self, wish: SetWorkerRole) -> None:
        try:
            slot = self._find(wish)
        except RequestError as error:
            wish.done.set_exception(error)
            return
        self._waiting.append((slot, wish))
        self.begin(slot, wish.role)

    def begin(self, slot: Slot, role: Role) -> None:
        """For whoever knows that it may be."""
        self._fleet.ask_role(slot, role)
        self._send(slot, SetRole(role))

    def hear(self, slot: Slot) -> None:
        """The worker has said what it is for."""
        for wish in self._take(slot, lambda wish: wish.role is slot.role):
            wish.done.set_result(None)

    def lose(self, slot: Slot) -> None:
        """A worker of this front end begins again, as what it was to be; others may not."""
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
        if wish.role not in DECODING and not any(
            other.is_ready and other.leaving is None and other.next_role in DECODING
            for other in self._fleet
            if other is not slot
        ):
            raise _conflict(
                f"worker {slot.name} is the last one that decodes",
                hint="let another one decode first",
            )
        return slot


def _conflict(message: str, hint: str = "") -> RequestError:
    return RequestError(message, status_hint=409, code="conflict", hint=hint)
