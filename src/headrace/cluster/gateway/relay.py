"""The way of one request: to an engine, to another one where that fails, and back to the client.

Decides when a request is tried again: as long as no byte of an answer has left. From then on the
answer is one engine's, and ends with an error where that fails.
"""

import asyncio
import time
from typing import Final

from starlette.types import Receive, Scope, Send

from headrace.cluster.gateway.ask import Ask, read_ask
from headrace.cluster.gateway.call import Call, Fault, Kind
from headrace.cluster.gateway.engine import Engine
from headrace.cluster.gateway.gateway import Gateway
from headrace.cluster.gateway.headers import Raw, to_client, to_engine
from headrace.cluster.gateway.reply import Reply, broken_off
from headrace.cluster.gateway.switch import Rejected
from headrace.cluster.gateway.traffic import Answered, record
from headrace.core.base.errors import HeadraceError, OverloadError
from headrace.core.base.request import FinishReason, Slo
from headrace.core.base.types import NS_PER_S, Ns, WorkerId
from headrace.core.router.events import (
    RouteDone,
    RouteProgress,
    RouteRequest,
    RouteStarted,
)
from headrace.server.body import read_body
from headrace.server.errors import ClientGone, failure_of_finish
from headrace.server.exchange import CLIENT_GONE, Exchange, until_gone
from headrace.server.params import slo_of
from headrace.server.service import RETRY_AFTER_S

EVENTS_PER_WORD: Final = 16  # of a stream, after which the router hears of it again
# Streams of these end with [DONE]; others have ends of their own.
_ENDS_WITH_DONE: Final = ("/v1/chat/completions", "/v1/completions")


class Relay:
    """POST of a route that generates, as an ASGI application."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange, path = Exchange.of(scope), scope["path"]
        headers = exchange.headers
        limit_bytes = self._gateway.config.server.max_body_bytes
        body = await read_body(headers, receive, limit_bytes, is_here=exchange.has_whole_body)
        ask = read_ask(path, body, headers)
        if self._gateway.names_tokens:
            ask = await self._gateway.named(ask, path, body)
        journey = Journey(self._gateway, exchange, ask, slo_of(headers), body, send)
        self._gateway.enter(journey)
        try:
            await journey.run(receive)
        finally:
            journey.record()
            self._gateway.leave(journey)


class Journey:
    """One request under way."""

    def __init__(
        self,
        gateway: Gateway,
        exchange: Exchange,
        ask: Ask,
        slo: Slo,
        body: bytes,
        send: Send,
    ) -> None:
        self._gateway = gateway
        self._exchange = exchange
        self._ask = ask
        self._slo = slo
        self._body = body
        self._path: str = exchange.scope["path"]
        self._request_id = gateway.next_request_id()
        self._reply = Reply(exchange, send)
        self._faults: list[Fault] = []
        self._excluded: list[WorkerId] = []
        self._leash: asyncio.Timeout | None = None
        self._until_gone: asyncio.Task[None] | None = None
        self._verdict: HeadraceError | None = None
        self._is_left = False  # by its client
        self._first_byte_ns: int | None = None
        self._is_broken = False
        self._num_told = 0  # events that the router has heard of

    async def run(self, receive: Receive) -> None:
        """Send an answer, whatever happens. Raises what it is where nothing was sent, and
        ClientGone.
        """
        timeout_s = self._gateway.config.server.request_timeout_s
        rest_s = timeout_s - (time.monotonic_ns() - self._exchange.arrived_ns) / NS_PER_S
        # In the next turn of the loop: first of all the request goes on.
        watching = asyncio.get_running_loop().call_soon(self._watch_client, receive)
        try:
            async with asyncio.timeout(rest_s) as self._leash:
                while not await self._try_once():
                    self._gateway.metrics.count_retry()
        except TimeoutError:
            if self._is_left:
                self._exchange.status = CLIENT_GONE
                raise ClientGone from None
            error = self._verdict or failure_of_finish(FinishReason.DEADLINE, "")
            assert error is not None
            if not self._reply.is_begun:
                raise error from None
            self._is_broken = True
            await self._reply.fail(error)
        finally:
            self._leash = None
            watching.cancel()
            if self._until_gone is not None:
                self._until_gone.cancel()
            self._gateway.switch.tell(RouteDone(self._request_id))

    def record(self) -> None:
        """When all is over, where traffic is recorded."""
        recorder, events = self._gateway.recorder, self._reply.events
        if recorder is None:
            return
        answered = Answered(
            arrived_ns=self._exchange.arrived_ns,
            first_byte_ns=self._first_byte_ns,
            status=self._exchange.status,
            is_broken=self._is_broken,
            num_events=0 if events is None else events.num,
        )
        record(recorder, self._request_id, self._ask, self._slo, answered)

    def fail(self, error: HeadraceError) -> None:
        """End it with an error that is the gateway's, as at the end of a drain."""
        self._verdict = self._verdict or error
        self._pull()

    def _watch_client(self, receive: Receive) -> None:
        self._until_gone = asyncio.create_task(until_gone(receive))
        self._until_gone.add_done_callback(self._on_gone)

    def _on_gone(self, gone: "asyncio.Task[None]") -> None:
        if not gone.cancelled():
            self._is_left = True
            self._pull()

    def _pull(self) -> None:
        if self._leash is not None and not self._leash.expired():
            self._leash.reschedule(asyncio.get_running_loop().time())

    # ---- one engine after another

    async def _try_once(self) -> bool:
        """Whether the client has its answer. False = another engine may be asked."""
        gateway, engine = self._gateway, await self._place()
        call = Call(gateway.links, engine)
        headers = to_engine(
            self._exchange.scope["headers"], self._exchange.request_id, engine.address.key
        )
        try:
            timeout_s = gateway.config.cluster.engine_first_byte_s
            await call.begin(self._path, headers, self._body, timeout_s)
            await call.read_if_short()
            self._body = b""  # nobody else will be asked
            await self._pass_on(call, engine)
        except Fault as fault:
            gateway.failed(engine, self._request_id, fault)
            self._exchange.peer_faults.append(f"engine {engine.name}: {fault}")
            if self._reply.is_begun:
                gateway.metrics.count_broken()
                self._is_broken = self._exchange.is_fault = True
                await self._reply.fail(broken_off())
                return True
            self._faults.append(fault)
            return await self._give_up(engine)
        finally:
            call.close()
        return True

    async def _place(self) -> Engine:
        ask, gateway = self._ask, self._gateway
        request = RouteRequest(
            request_id=self._request_id,
            block_names=ask.block_names,
            are_names_published=ask.is_named_by_tokens,
            num_tokens=ask.num_tokens,
            num_choices=ask.num_choices,
            max_tokens=ask.max_tokens,
            priority=ask.priority,
            slo=self._slo,
            session=ask.session,
            tenant=gateway.tenants.of(self._exchange.headers),
            adapter=ask.model,
            arrived_ns=Ns(self._exchange.arrived_ns),
            excluded=(*self._excluded, *gateway.resting(ask.model, self._excluded)),
            is_migration=bool(self._faults),
        )
        try:
            worker_id = await gateway.switch.place(request)
        except Rejected as rejected:
            raise gateway.error_of(rejected, ask.model) from None
        self._excluded.append(worker_id)
        engine = gateway.engine(worker_id)
        return engine or await self._place()  # it has gone down between two turns of the loop

    async def _give_up(self, engine: Engine) -> bool:
        """Whether nobody else is to be asked; then the client has the last word there was.

        Where all are down, the router knows how long to wait for one.
        """
        gateway, last = self._gateway, self._faults[-1]
        may_retry = len(self._faults) <= gateway.config.cluster.max_migrations
        others = gateway.candidates(self._ask.model, self._excluded)
        if may_retry and (others or not gateway.candidates(self._ask.model, ())):
            return False
        if last.refusal is None:
            raise OverloadError("no engine has given a whole answer", retry_after_s=RETRY_AFTER_S)
        await self._begin(last.refusal.status, last.refusal.headers, engine)
        await self._reply.pass_on(last.refusal.body)
        await self._reply.end()
        return True

    # ---- the answer

    async def _pass_on(self, call: Call, engine: Engine) -> None:
        tell, reply = self._gateway.switch.tell, self._reply
        if call.status == 200:
            tell(RouteStarted(self._request_id))
        self._first_byte_ns = time.monotonic_ns()
        waited_ns = self._first_byte_ns - self._exchange.arrived_ns
        self._gateway.metrics.first_byte.observe(waited_ns / NS_PER_S)
        await self._begin(call.status, call.headers, engine)
        await reply.pass_on(call.first)
        if reply.begin_push(call.resume):
            await call.pour(self._push)
        else:
            while chunk := await call.read():
                await reply.pass_on(chunk)
                self._count_events()
        if reply.events and self._path in _ENDS_WITH_DONE and not reply.events.is_whole:
            raise Fault(Kind.BROKEN, "the stream ended before [DONE]")
        await reply.end()

    def _push(self, chunk: bytes) -> bool:
        """Without a task in between: an event costs its two system calls and little more."""
        has_room = self._reply.push(chunk)
        self._count_events()
        return has_room

    def _count_events(self) -> None:
        events = self._reply.events
        if events is not None and events.num >= self._num_told + EVENTS_PER_WORD:
            self._num_told = events.num
            self._gateway.switch.tell(RouteProgress(self._request_id, events.num))

    async def _begin(self, status: int, headers: Raw, engine: Engine) -> None:
        decision_id = str(self._request_id)
        await self._reply.begin(status, to_client(headers, engine.name, decision_id))
