"""The one shape of every decision maker."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from headrace.core.base.types import Ns

Event = TypeVar("Event", contravariant=True)
Effect = TypeVar("Effect", covariant=True)


class Machine(Protocol[Event, Effect]):
    """A pure state machine: the same state and event always give the same effects."""

    def handle(self, now: Ns, event: Event) -> Sequence[Effect]:
        """Apply one event and return the effects to carry out, in order. `now` never decreases.

        A client's mistake is an effect (Reject); InvariantError is our bug.
        """
        ...
