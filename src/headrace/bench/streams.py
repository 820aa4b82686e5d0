"""Many streams at once, timed by the moments that their events carry.

Decides what a request's and an event's delay are; refuses to know what is asked, and who answers.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from headrace.bench.loads import Spread
from headrace.core.base.errors import HeadraceError

Ages = Callable[[bytes, int], list[int]]
"""(whole events, when they were read) -> how long ago their moments are; all in nanoseconds. The
first of a stream is that at which the request was there, the others those at which each was sent.
"""


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """In milliseconds."""

    request_ms: Spread  # sent by the client until it is with the engine
    event_ms: Spread  # sent by the engine until read by the client


class Samples:
    def __init__(self) -> None:
        self.request_ms: list[float] = []
        self.event_ms: list[float] = []

    def delays(self) -> Delays:
        return Delays(request_ms=Spread.of(self.request_ms), event_ms=Spread.of(self.event_ms))


class Load:
    """`body` is asked of /v1/completions, with each stream's number."""

    def __init__(self, body: Callable[[int], bytes], ages: Ages, stream_s: float) -> None:
        self._body = body
        self._ages = ages
        self._stream_s = stream_s  # that each takes

    async def run(self, urls: Sequence[str], num_streams: int, samples: Samples) -> None:
        """Each of the streams twice, one after the other, so that for a while all are under way.
        They begin evenly over the time that one of them takes.
        """

        async def client(number: int) -> None:
            await asyncio.sleep(self._stream_s * number / num_streams)
            for _ in range(2):
                await self._read_stream(urls[number % len(urls)], number, samples)

        async with asyncio.TaskGroup() as clients:
            for number in range(num_streams):
                clients.create_task(client(number))

    async def _read_stream(self, url: str, number: int, samples: Samples) -> None:
        body = self._body(number)
        host, _, port = url.removeprefix("http://").partition(":")
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        transport, reader = await loop.create_connection(
            lambda: _Reader(head.encode() + body, self._ages, samples), host, int(port)
        )
        is_whole = await reader.is_over
        transport.close()
        if not is_whole:
            raise HeadraceError("a stream broke off", url=url)


class _Reader(asyncio.Protocol):
    """Reads a stream with as little work as there can be: its own delay is in the figures too."""

    def __init__(self, request: bytes, ages: Ages, samples: Samples) -> None:
        self.is_over = asyncio.get_running_loop().create_future()
        self._request = request
        self._ages = ages
        self._samples = samples
        self._sent_ns = 0
        self._rest = b""
        self._is_first = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._sent_ns = time.monotonic_ns()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        read_ns = time.monotonic_ns()
        data = self._rest + data
        end = data.rfind(b"\n\n") + 2  # an event may come in two pieces
        self._rest = data[end:] if end > 1 else data
        for age_ns in self._ages(data[:end], read_ns) if end > 1 else ():
            if self._is_first:
                self._is_first = False
                self._samples.request_ms.append((read_ns - age_ns - self._sent_ns) / 1e6)
            else:
                self._samples.event_ms.append(age_ns / 1e6)
        if b"[DONE]" in data and not self.is_over.done():
            self.is_over.set_result(True)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_over.done():
            self.is_over.set_result(False)


def cpu_s(pid: int) -> float:
    """Time on a processor that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def apart(*pids: int) -> Iterator[None]:
    """These processes on a core that nothing else here uses, what they have started included; only
    where there are others.
    """
    cores = sorted(os.sched_getaffinity(0))
    family = [os.getpid(), *_descendants(os.getpid())] if len(cores) > 1 else []
    try:
        for one in family:
            _pin(one, {cores[-1]} if one in pids else set(cores[:-1]))
        yield
    finally:
        if family:
            _pin(os.getpid(), set(cores))


def _pin(pid: int, cores: set[int]) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # a thread that has ended
            os.sched_setaffinity(int(task.name), cores)


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for word in (task / "children").read_text().split():
            found += [int(word), *_descendants(int(word))]
    return found
