"""The gateway's state: its engines, the router among them, and the answers under way.

Decides who may come in, and what an engine's fault means to the router; refuses to know what is
asked. All of it belongs to one event loop.
"""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from typing import Final, Protocol

import msgspec

from headrace.cluster.gateway.addresses import engine_addresses
from headrace.cluster.gateway.ask import Ask
from headrace.cluster.gateway.call import Fault, Kind
from headrace.cluster.gateway.engine import Engine
from headrace.cluster.gateway.kv_sources import KvSources
from headrace.cluster.gateway.link import Links
from headrace.cluster.gateway.metrics import GatewayMetrics
from headrace.cluster.gateway.switch import Rejected, Switch
from headrace.cluster.gateway.traffic import facts_of
from headrace.cluster.gateway.watch import Watch, open_session
from headrace.core.base.errors import HeadraceError, OverloadError, RequestError
from headrace.core.base.types import WorkerId
from headrace.core.config.schema import Config
from headrace.core.router.core import RouterCore
from headrace.core.router.events import (
    RouteDone,
    RouteFailed,
    WorkerDown,
    WorkerLoad,
    WorkerStats,
)
from headrace.core.router.refusal import Noun
from headrace.live.traffic import TrafficRecorder
from headrace.server.callers import Tenants
from headrace.server.service import RETRY_AFTER_S, Door

_log = logging.getLogger(__name__)

# Passed on to engines, where these know them.
GENERATION: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
ROUTES: Final = frozenset((*GENERATION, "/v1/models", "/health", "/ready", "/metrics", "/version"))
NO_MODEL: Final = "adapter_not_found"  # as the router says it: see Engine.come_up


class Endable(Protocol):
    """A request under way."""

    def fail(self, error: HeadraceError) -> None: ...


class Gateway:
    def __init__(self, config: Config) -> None:
        """ConfigError where the engines' addresses, keys or tokenizer are wrong, or traffic cannot
        be recorded as it shall be.
        """
        self.config = config
        speed = config.cluster.engine_prefill_tokens_per_s
        self.engines = [Engine(one, speed) for one in engine_addresses(config.cluster)]
        self.switch = Switch(RouterCore(config.router, noun=Noun.ENGINE))
        self._kv = KvSources(config, self.engines, self.switch)
        self.metrics = GatewayMetrics(self.engines, self._kv, self.switch.router, ROUTES)
        self._by_worker: dict[WorkerId, Engine] = {}
        self._cards: dict[str, msgspec.Raw] = {}  # of models, by name
        self._worker_ids = map(WorkerId, count())
        self._request_ids = count(1)
        self.tenants = Tenants()
        self._under_way: set[Endable] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_draining = False
        self.recorder = TrafficRecorder.of(config.telemetry)
        self.links = Links()
        self._watches: dict[str, Watch] = {}
        self._watching: asyncio.Task[None] | None = None

    # ---- life

    def open(self) -> None:
        """Begin to watch the engines. On the loop that all of it will run on."""
        if self.recorder is not None:
            self.recorder.begin(facts_of(self.config))
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(self._on_watch_end)

    async def _watch(self) -> None:
        cluster = self.config.cluster
        async with open_session() as session, asyncio.TaskGroup() as tasks:
            for engine in self.engines:
                watch = Watch(engine, session, self, cluster.silence_timeout_s)
                self._watches[engine.name] = watch
                tasks.create_task(watch.run(cluster.engine_poll_s))
            for feed in self._kv.feeds:
                tasks.create_task(feed.run())

    def _on_watch_end(self, watching: "asyncio.Task[None]") -> None:
        if not watching.cancelled():
            _log.critical("engines are not watched any more", exc_info=watching.exception())

    def close(self) -> None:
        """The loop awaits what this cancels."""
        if self._watching is not None:
            self._watching.cancel()
        self._kv.close()
        self.links.close()
        if self.recorder is not None:
            self.recorder.close()

    @property
    def door(self) -> Door:
        if self._is_draining:
            return Door.DRAINING
        if self._watching is not None and self._watching.done():
            return Door.FAILED
        return Door.OPEN if any(engine.is_up for engine in self.engines) else Door.WAITING

    # ---- requests under way

    def enter(self, request: Endable) -> None:
        """OverloadError 503 while the gateway drains."""
        if self._is_draining:
            raise OverloadError("the gateway is shutting down", retry_after_s=RETRY_AFTER_S)
        self._under_way.add(request)
        self._is_idle.clear()

    def leave(self, request: Endable) -> None:
        self._under_way.discard(request)
        if not self._under_way:
            self._is_idle.set()

    @property
    def num_deliveries(self) -> int:
        return len(self._under_way)

    def begin_drain(self) -> None:
        self._is_draining = True

    async def drain(self, timeout_s: float) -> bool:
        """See `server.run.Drainable`."""
        self.begin_drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        left = list(self._under_way)
        for request in left:
            request.fail(OverloadError("the gateway is shutting down", retry_after_s=RETRY_AFTER_S))
        return not left

    # ---- routing

    def next_request_id(self) -> int:
        return next(self._request_ids)

    @property
    def names_tokens(self) -> bool:
        """Whether any engine publishes what it has cached."""
        return bool(self._kv.caches)

    async def named(self, ask: Ask, path: str, body: bytes) -> Ask:
        """With names by tokens, where that can be done."""
        return await self._kv.named(ask, path, body)

    def engine(self, worker_id: WorkerId) -> Engine | None:
        """None = it has gone down since."""
        return self._by_worker.get(worker_id)

    def candidates(self, model: str, excluded: Iterable[WorkerId]) -> list[Engine]:
        """Engines that are up and could be asked."""
        known = set(excluded)
        return [
            engine
            for worker_id, engine in self._by_worker.items()
            if worker_id not in known and engine.serves(model)
        ]

    def resting(self, model: str, excluded: Iterable[WorkerId]) -> list[WorkerId]:
        """Those that asked to be left alone, unless all did."""
        now = self.switch.now()
        resting = [worker_id for worker_id, one in self._by_worker.items() if one.rests(now)]
        if not resting:
            return resting
        able = self.candidates(model, excluded)
        if all(engine.rests(now) for engine in able):
            return []
        return [one.worker_id for one in able if one.rests(now) and one.worker_id is not None]

    def error_of(self, rejected: Rejected, model: str) -> HeadraceError:
        if rejected.effect.code != NO_MODEL:
            return rejected.error()
        may_come = any(
            not engine.was_ever_up or engine.serves(model)
            for engine in self.engines
            if not engine.is_up
        )
        if may_come:
            return OverloadError(
                "no engine that serves this model is up", retry_after_s=RETRY_AFTER_S
            )
        return RequestError(
            "no such model",
            status_hint=404,
            code="model_not_found",
            param="model",
            model=model[:100],
            hint="`GET /v1/models` lists what there is",
        )

    # ---- what engines do

    def failed(self, engine: Engine, request_id: int, fault: Fault) -> None:
        """The request is booked there no longer; the engine may be asked less, or not at all."""
        engine.num_faults += 1
        self.metrics.count_fault(engine.name, fault.kind.value)
        if fault.kind is Kind.BUSY:
            retry_after_s = fault.refusal.retry_after_s if fault.refusal else RETRY_AFTER_S
            engine.rest(self.switch.now(), retry_after_s)
            self.switch.tell(RouteDone(request_id))
            return
        self.switch.tell(RouteFailed(request_id, str(fault)))
        if fault.kind is Kind.REFUSED:
            self.went_down(engine, str(fault))
        else:
            self._watches[engine.name].wake()

    def came_up(self, engine: Engine, cards: dict[str, msgspec.Raw]) -> None:
        """It answers, with these models; again where these have changed."""
        models = tuple(cards)
        known = {name for one in self.engines if one is not engine for name in one.models}
        known.update(models)
        self._cards = {name: one for name, one in (self._cards | cards).items() if name in known}
        self._kv.learn(self._cards)
        if engine.is_up and models == engine.models:
            return
        if engine.worker_id is not None:
            self._forget(engine, "its models have changed", is_failure=False)
        engine.models = models
        up = engine.come_up(next(self._worker_ids))
        self._by_worker[up.worker_id] = engine
        _log.info("engine %s is up", engine.name)
        self.switch.tell(up)
        self._kv.came_up(engine)

    def went_down(self, engine: Engine, reason: str) -> None:
        if engine.is_up:
            _log.warning("engine %s is down: %s", engine.name, reason)
            self._forget(engine, reason, is_failure=True)
        engine.reason = reason

    def told(self, engine: Engine, load: WorkerLoad) -> None:
        if engine.worker_id is not None:
            self.switch.tell(WorkerStats(engine.worker_id, load))

    def _forget(self, engine: Engine, reason: str, *, is_failure: bool) -> None:
        worker_id, engine.worker_id = engine.worker_id, None
        assert worker_id is not None
        del self._by_worker[worker_id]
        self.switch.tell(WorkerDown(worker_id, reason, is_failure))

    # ---- models

    def cards(self) -> list[msgspec.Raw]:
        """Of all models that can be had now, as their engines show them."""
        names = {name: None for engine in self.engines if engine.is_up for name in engine.models}
        return [self._cards[name] for name in names]

    def card(self, name: str) -> msgspec.Raw | None:
        is_served = any(engine.is_up and name in engine.models for engine in self.engines)
        return self._cards[name] if is_served else None
