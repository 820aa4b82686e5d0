"""Workers that come back: which one, how long it was away and why.

Decides what of that people hear; refuses to know what it means to a request. Belongs to the crew's
thread. `FLEET` is the log of what becomes of workers, a few lines in a day, which is shown unless
the operator wants errors alone.
"""

import logging
from typing import Final

from headrace.cluster.fleet import MAX_GONE, Fleet, Slot
from headrace.core.base.types import NS_PER_S, Ns

FLEET: Final = logging.getLogger("headrace.fleet")


class Returns:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._away: dict[str, tuple[Ns, str]] = {}  # since when and why, by name

    def away(self, now: Ns, slot: Slot, why: str, *, is_failure: bool) -> None:
        """This life of it is over. Who was sent away for good does not come back: another one may
        have its name then.
        """
        if slot.is_remote or any(one is slot for one in self._fleet):
            is_restart = not (is_failure or slot.is_remote)
            # Of several lives that come to nothing, the first one ended the service.
            began = self._away.pop(slot.name, (now, ""))[0]
            self._away[slot.name] = began, "it was to restart" if is_restart else why
            if len(self._away) > MAX_GONE:
                del self._away[next(iter(self._away))]
        else:
            self._away.pop(slot.name, None)

    def back(self, now: Ns, slot: Slot) -> None:
        """It serves."""
        if slot.name in self._away:
            began, why = self._away.pop(slot.name)
            FLEET.info(
                "worker %s is back after %.1f s: %s", slot.name, (now - began) / NS_PER_S, why
            )
