"""Drives a RouterCore by an event loop's clock: requests come in, engines come out.

Decides nothing. All of it belongs to one event loop, on which the core runs too.
"""

import asyncio
import time
from typing import assert_never

from headrace.core.base.errors import HeadraceError, OverloadError, RequestError
from headrace.core.base.events import CallAt, Timer
from headrace.core.base.types import NS_PER_S, Ns, WorkerId
from headrace.core.router.core import RouterCore
from headrace.core.router.events import (
    Dispatch,
    Queued,
    Resync,
    RouteArrive,
    RouteDone,
    RouteReject,
    RouteRequest,
    RouterEvent,
)


class Rejected(Exception):
    """The router has no engine for a request."""

    def __init__(self, effect: RouteReject) -> None:
        super().__init__(effect.message)
        self.effect = effect

    def error(self) -> HeadraceError:
        effect = self.effect
        if effect.retry_after_s is not None:
            return OverloadError(
                effect.message,
                retry_after_s=effect.retry_after_s,
                status_hint=effect.status_hint,
                hint=effect.hint,
            )
        return RequestError(
            effect.message, status_hint=effect.status_hint, code=effect.code, hint=effect.hint
        )


class Switch:
    def __init__(self, router: RouterCore) -> None:
        self.router = router
        self._placing: dict[int, asyncio.Future[WorkerId]] = {}
        self._now = Ns(0)

    def now(self) -> Ns:
        """Never earlier than what the core was told last."""
        self._now = max(self._now, Ns(time.monotonic_ns()))
        return self._now

    async def place(self, request: RouteRequest) -> WorkerId:
        """The engine that the request goes to, when there is room for it. It is booked there until
        the router is told that it is done. Raises Rejected.
        """
        future: asyncio.Future[WorkerId] = asyncio.get_running_loop().create_future()
        self._placing[request.request_id] = future
        try:
            self.tell(RouteArrive(request))
            return await future
        except asyncio.CancelledError:
            self.tell(RouteDone(request.request_id))
            raise
        finally:
            del self._placing[request.request_id]

    def tell(self, event: RouterEvent) -> None:
        for effect in self.router.handle(self.now(), event):
            match effect:
                case Dispatch(request_id, worker_id):
                    if not self._placing[request_id].done():
                        self._placing[request_id].set_result(worker_id)
                case RouteReject(request_id):
                    if not self._placing[request_id].done():
                        self._placing[request_id].set_exception(Rejected(effect))
                case CallAt(at, timer_id):
                    delay_s = max(0, at - self._now) / NS_PER_S
                    asyncio.get_running_loop().call_later(delay_s, self._ring, at, timer_id)
                case Queued() | Resync():
                    pass
                case _:
                    assert_never(effect)

    def _ring(self, at: Ns, timer_id: int) -> None:
        # A loop's clock may be coarse, and the core ignores what is too early.
        self._now = max(self._now, at)
        self.tell(Timer(timer_id))
