"""When requests are sent: at times of their own, all at once, or as answers come.

Decides the moment of each request and what follows an answer; refuses to judge answers.
"""

import asyncio
from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from typing import Final

from headrace.bench.serve.asked import Traffic
from headrace.bench.serve.asker import Asker
from headrace.bench.serve.outcome import Outcome
from headrace.bench.serve.wording import Wording
from headrace.core.base.request import SeqSpec
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.workload.source import Source

MOST_TOGETHER: Final = 16

OnEnd = Callable[[Outcome], None]


class Driver:
    """One run of a Source's requests."""

    def __init__(
        self,
        asker: Asker,
        traffic: Traffic,
        source: Source,
        wording: Wording,
        *,
        on_end: OnEnd,
        max_in_flight: int,
    ) -> None:
        """`on_end` hears of every outcome as it comes."""
        self._asker = asker
        self._traffic = traffic
        self._source = source
        self._wording = wording
        self._on_end = on_end
        self._room = asyncio.Semaphore(max_in_flight)
        duration_s = traffic.duration_s
        self._until_ns = None if duration_s is None else round(duration_s * NS_PER_S)
        self._stopped = asyncio.Event()
        self.num_in_flight = 0
        self.most_in_flight = 0
        self.num_left = 0  # under way when the run was stopped
        self.outcomes: list[Outcome] = []

    def stop(self) -> None:
        """Send nothing more and leave what is under way, which has no outcome then."""
        self.num_left = self.num_in_flight
        self._stopped.set()

    async def run(self) -> None:
        """Return when all is answered, or after `stop`."""
        sending = self._send_as_answered() if self._traffic.is_closed else self._send_when_due()
        tasks = [asyncio.create_task(sending), asyncio.create_task(self._stopped.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not tasks[0].cancelled():
            tasks[0].result()

    async def _send_when_due(self) -> None:
        arrivals = islice(self._source.arrivals(), self._traffic.num_requests)
        async with asyncio.TaskGroup() as sessions:
            for number, spec in enumerate(arrivals):
                due_ns = Ns(0) if self._traffic.is_burst else spec.arrived_ns
                if self._is_too_late(due_ns):
                    return
                payload = self._asker.payload(spec)
                # One turn of a busy loop takes longer than the gap between two requests: those that
                # are late are sent together.
                if due_ns > self._asker.now() or number % MOST_TOGETHER == 0:
                    await self._sleep_until(due_ns)
                sessions.create_task(self._session(spec, payload, due_ns))

    async def _send_as_answered(self) -> None:
        """A client takes the next session when its last one has ended."""
        arrivals = islice(self._source.arrivals(), self._traffic.num_requests)
        async with asyncio.TaskGroup() as clients:
            for number in range(self._traffic.concurrency):
                clients.create_task(self._client(arrivals, number))

    async def _client(self, arrivals: Iterator[SeqSpec], number: int) -> None:
        rng = Random(f"{self._traffic.seed}/client/{number}")
        think_s = self._traffic.think_s or 0.0
        for spec in arrivals:
            payload = self._asker.payload(spec)
            due_ns = self._asker.now()
            if self._is_too_late(due_ns):
                return
            await self._session(spec, payload, due_ns)
            if think_s:
                await asyncio.sleep(rng.expovariate(1.0) * think_s)
            else:
                # A client that is refused at once must leave the others a turn.
                await asyncio.sleep(0)

    async def _session(self, spec: SeqSpec, payload: bytes, due_ns: Ns) -> None:
        """A request and all that follow its answers. One that fails is followed by none."""
        while True:
            outcome, text = await self._ask(spec, payload, due_ns)
            if outcome.fault or not outcome.num_output_tokens:
                return
            heard = self._wording.hear(text, outcome.num_output_tokens)
            following = self._source.follow_up(spec, heard, outcome.ended_ns)
            if following is None or self._is_too_late(following.arrived_ns):
                return
            spec, due_ns = following, following.arrived_ns
            payload = self._asker.payload(spec)
            await self._sleep_until(due_ns)

    async def _ask(self, spec: SeqSpec, payload: bytes, due_ns: Ns) -> tuple[Outcome, str]:
        async with self._room:
            self.num_in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
            try:
                outcome, text = await self._asker.ask(spec, payload, due_ns)
            finally:
                self.num_in_flight -= 1
        self.outcomes.append(outcome)
        self._on_end(outcome)
        return outcome, text

    async def _sleep_until(self, due_ns: Ns) -> None:
        await asyncio.sleep(max(0, due_ns - self._asker.now()) / NS_PER_S)

    def _is_too_late(self, due_ns: Ns) -> bool:
        return self._until_ns is not None and due_ns >= self._until_ns
