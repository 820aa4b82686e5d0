"""Whether the client itself was the bottleneck: its time on a processor, and how late its event
loop was.
"""

import asyncio
import time
from types import TracebackType

import msgspec

from headrace.bench.serve.intervals import Distribution
from headrace.core.base.types import NS_PER_MS, NS_PER_S

PERIOD_S = 0.02


class ClientFacts(msgspec.Struct, frozen=True, kw_only=True):
    cpu_share: float  # of one core; its event loop has one thread
    cpu_us_per_event: float | None
    loop_lag_ms: Distribution  # how much later than asked a timer fired
    most_in_flight: int


class ClientWatch:
    """Watches while it is open, within a running loop; delays, from the warm-up's end on."""

    def __init__(self, warm_up_s: float = 0.0) -> None:
        self._warm_up_s = warm_up_s
        self._lags_ms: list[float] = []

    async def __aenter__(self) -> "ClientWatch":
        self._wall_ns, self._cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._wall_ns = time.perf_counter_ns() - self._wall_ns
        self._cpu_ns = time.process_time_ns() - self._cpu_ns

    def facts(self, *, num_events: int, most_in_flight: int) -> ClientFacts:
        """Once it is closed."""
        return ClientFacts(
            cpu_share=self._cpu_ns / max(1, self._wall_ns),
            cpu_us_per_event=self._cpu_ns / 1000 / num_events if num_events else None,
            loop_lag_ms=Distribution.of(self._lags_ms),
            most_in_flight=most_in_flight,
        )

    async def _beat(self) -> None:
        await asyncio.sleep(self._warm_up_s)
        while True:
            due_ns = time.perf_counter_ns() + round(PERIOD_S * NS_PER_S)
            await asyncio.sleep(PERIOD_S)
            self._lags_ms.append(max(0, time.perf_counter_ns() - due_ns) / NS_PER_MS)
