"""A RouterCore driven by hand, with `check()` after every event."""

from hashlib import sha256
from typing import Any

from headrace.core.base.events import BlocksRemoved, BlocksStored, CallAt, KvChange, Timer
from headrace.core.base.plan import WorkerSpec
from headrace.core.base.types import NS_PER_MS, BlockId, Ns, WorkerId
from headrace.core.config.schema import RouterConfig
from headrace.core.router.core import RouterCore
from headrace.core.router.events import (
    Dispatch,
    Queued,
    Resync,
    RouteArrive,
    RouteDone,
    RouterEffect,
    RouteReject,
    RouteRequest,
    RouterEvent,
    RouteStarted,
    WorkerDown,
    WorkerKv,
    WorkerLoad,
    WorkerStats,
    WorkerUp,
)

SIZE = 16


def names(text: str, count: int) -> tuple[bytes, ...]:
    """The names of a chain of blocks; chains with the same text begin alike."""
    return tuple(sha256(f"{text}/{i}".encode()).digest()[:16] for i in range(count))


def spec(**fields: object) -> WorkerSpec:
    given: dict[str, object] = {
        "model_digest": "m",
        "kv_dtype": "bf16",
        "block_size": SIZE,
        "num_blocks": 1024,
        "max_model_len": 4096,
        "vocab_size": 100,
        **fields,
    }
    return WorkerSpec(**given)  # type: ignore[arg-type]


def load(**fields: float | None) -> WorkerLoad:
    given: dict[str, Any] = {
        "num_running": 0,
        "num_waiting": 0,
        "num_queued_prefill_tokens": 0,
        "num_kv_tokens": 0,
        "num_free_blocks": 1024,
        "num_cached_blocks": 0,
        "num_pinned_blocks": 0,
        **fields,
    }
    return WorkerLoad(**given)


def stored(*chain: bytes) -> tuple[BlocksStored]:
    return (BlocksStored(chain, b"", (BlockId(0),) * len(chain)),)


def removed(*chain: bytes) -> tuple[BlocksRemoved]:
    return (BlocksRemoved(chain),)


class Routing:
    def __init__(self, num_workers: int = 0, **config: object) -> None:
        self.core = RouterCore(RouterConfig(**config))  # type: ignore[arg-type]
        self.now = Ns(0)
        self.timers: list[CallAt] = []
        self.num_requests = 0
        self.kv_seq_no: dict[int, int] = {}
        for worker_id in range(num_workers):
            self.up(worker_id)

    def tell(self, event: RouterEvent, *, after_ms: float = 0.0) -> list[RouterEffect]:
        self.now = Ns(self.now + round(after_ms * NS_PER_MS))
        effects = self.core.handle(self.now, event)
        self.core.check()
        self.timers += [effect for effect in effects if isinstance(effect, CallAt)]
        return [effect for effect in effects if not isinstance(effect, CallAt)]

    def ring(self, *, until_ms: float) -> list[RouterEffect]:
        """Let the timers ring that are due by then."""
        found: list[RouterEffect] = []
        until_ns = round(until_ms * NS_PER_MS)
        while due := [timer for timer in self.timers if timer.at_ns <= until_ns]:
            timer = min(due, key=lambda timer: timer.at_ns)
            self.timers.remove(timer)
            self.now = max(self.now, timer.at_ns)
            found += self.tell(Timer(timer.timer_id))
        self.now = max(self.now, Ns(until_ns))
        return found

    def up(self, worker_id: int, name: str = "", **fields: object) -> list[RouterEffect]:
        given = {"spec": spec(), **fields}
        name = name or f"w{worker_id}"
        return self.tell(
            WorkerUp(worker_id=WorkerId(worker_id), name=name, **given)  # type: ignore[arg-type]
        )

    def down(self, worker_id: int, **fields: bool) -> list[RouterEffect]:
        return self.tell(WorkerDown(WorkerId(worker_id), "test", **fields))

    def kv(self, worker_id: int, *changes: KvChange) -> list[RouterEffect]:
        """The next changes of a worker's cache."""
        seq_no = self.kv_seq_no.get(worker_id, 0)
        self.kv_seq_no[worker_id] = seq_no + len(changes)
        return self.tell(WorkerKv(WorkerId(worker_id), seq_no, changes))

    def stats(self, worker_id: int, received: int | None = None, **fields: float) -> None:
        self.tell(WorkerStats(WorkerId(worker_id), load(**fields), received))

    def request(
        self, chain: tuple[bytes, ...] = (), num_tokens: int = 0, **fields: object
    ) -> RouteRequest:
        self.num_requests += 1
        given: dict[str, object] = {
            "request_id": self.num_requests,
            "block_names": chain,
            "num_tokens": num_tokens or len(chain) * SIZE + 1,
            "arrived_ns": self.now,
            **fields,
        }
        return RouteRequest(**given)  # type: ignore[arg-type]

    def arrive(
        self, chain: tuple[bytes, ...] = (), num_tokens: int = 0, **fields: object
    ) -> Dispatch | Queued | RouteReject:
        """The first word on a request."""
        effects = self.tell(RouteArrive(self.request(chain, num_tokens, **fields)))
        first = effects[0]
        assert not isinstance(first, Resync | CallAt)
        return first

    def place(
        self, chain: tuple[bytes, ...] = (), num_tokens: int = 0, **fields: object
    ) -> Dispatch:
        """Send a request that gets a worker at once."""
        effect = self.arrive(chain, num_tokens, **fields)
        assert isinstance(effect, Dispatch), effect
        return effect

    def started(self, request_id: int, *, after_ms: float = 0.0) -> list[RouterEffect]:
        return self.tell(RouteStarted(request_id), after_ms=after_ms)

    def done(self, request_id: int, *, after_ms: float = 0.0) -> list[RouterEffect]:
        return self.tell(RouteDone(request_id), after_ms=after_ms)

    def serve(self, request_id: int) -> list[RouterEffect]:
        """Let a request that was placed go its whole way."""
        return self.started(request_id) + self.done(request_id)
