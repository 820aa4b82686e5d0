"""Hand-offs: whether a prompt is worth computing elsewhere, and where it goes from there.

While one worker computes a prompt, the way to the one that will decode it is open: a *leg*, which
the router knows as a request of its own, so that what comes is booked where it comes. Decides which
legs there are; refuses to choose a worker. Pure.
"""

from typing import NamedTuple

import msgspec

from headrace.core.base.errors import InvariantError
from headrace.core.base.types import NS_PER_MS, Ns, SeqId, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from headrace.core.router.core import RouterCore
from headrace.core.router.events import RouteRequest
from headrace.core.router.flight import Flight


class Leg(NamedTuple):
    request_id: int  # the router's
    worker_id: WorkerId
    seq_id: SeqId  # whose KV is copied


class Legs:
    """Of flights that a prefill worker has, one each."""

    def __init__(self) -> None:
        self._leg_of: dict[Flight, Leg] = {}
        self._asked: dict[int, tuple[Flight, SeqId]] = {}  # that the router is asked for

    def find(self, flight: Flight) -> Leg | None:
        return self._leg_of.get(flight)

    def ask(self, request_id: int, flight: Flight, seq_id: SeqId) -> None:
        """The router is asked where this sequence of the flight may be expected."""
        self._asked[request_id] = flight, seq_id

    def answer(self, request_id: int, worker_id: WorkerId) -> tuple[Flight, Leg]:
        flight, seq_id = self._asked.pop(request_id)
        leg = self._leg_of[flight] = Leg(request_id, worker_id, seq_id)
        return flight, leg

    def withdraw(self, request_id: int) -> None:
        del self._asked[request_id]

    def take(self, flight: Flight) -> Leg | None:
        """Its leg, which is one no more."""
        return self._leg_of.pop(flight, None)

    def to(self, worker_id: WorkerId) -> list[Flight]:
        return [flight for flight, leg in self._leg_of.items() if leg.worker_id == worker_id]

    def check(self) -> None:
        for flight, leg in self._leg_of.items():
            if flight.is_over or not flight.is_prefilling:
                raise InvariantError("a way from nowhere", request_id=leg.request_id)


def as_coming(request: RouteRequest, request_id: int) -> RouteRequest:
    """What the router is to find a worker for beforehand, under an id of its own."""
    return msgspec.structs.replace(
        request,
        request_id=request_id,
        neighbour_weight=0.0,
        is_migration=True,
        is_coming=True,
        prompt_id=request.request_id,
    )


def as_prompt(request: RouteRequest) -> RouteRequest:
    """Its prompt and first token alone."""
    return msgspec.structs.replace(request, role=Role.PREFILL, max_tokens=1)


def is_worth_it(now: Ns, request: RouteRequest, router: RouterCore, config: ClusterConfig) -> bool:
    """Whether a prefill worker should compute the prompt: it costs the decoding ones nothing there,
    and the way from there something. What ends with its first token ends there.
    """
    if config.handoff == "never":
        return False
    there = router.quote(now, as_prompt(request))
    here = router.quote(now, request)
    ends_there = request.max_tokens < 2
    if there is None or (here is None and not ends_there):
        return False  # whoever is refused in the end should not have heard a first token
    if here is None or config.handoff == "always":
        return True
    if ends_there:
        return there.total_ns <= here.total_ns
    rest = router.quote(now, as_coming(request, request.request_id), there.worker_id)
    if rest is None:
        return False
    # What comes while the rest of the prompt is computed is waited for by nobody.
    in_time_ns = rest.terms.transfer_ns * (1 - 1 / there.terms.num_steps)
    hidden_ns = min(there.terms.prefill_ns, in_time_ns)
    total_ns = there.total_ns + config.handoff_ms * NS_PER_MS + rest.total_ns - hidden_ns
    return total_ns < here.total_ns
