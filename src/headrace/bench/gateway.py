"""What a gateway adds to the time that a stream's bytes take, at many streams at once.

The same load goes straight to engines that compute nothing, through a relay that does nothing, and
through a gateway, in turns; what is added is the difference of the distributions. The relay's part
is what any process in that place adds. Where there are two cores or more, gateway and relay have
one of them, and engines and clients share the others in all turns: so what they cost each other is
no part of what is added.
"""

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop

from headrace.bench.loads import Spread
from headrace.bench.pacer import MODEL, NUM_EVENTS, PACE_S
from headrace.bench.server import free_port, is_ready, serving
from headrace.core.base.errors import HeadraceError

PROMPT = "The water of the headrace drives the wheel of the mill. " * 40  # 2.2 kB, 8 blocks
NUM_ENGINES = 2
NUM_ROUNDS = 2
START_TIMEOUT_S = 30.0
_MOMENT = re.compile(rb'"ns":(\d+)')


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """In milliseconds."""

    request_ms: Spread  # sent by the client until read by the engine
    event_ms: Spread  # sent by the engine until read by the client


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    num_streams: int
    events_per_s: float
    cpu_us_per_event: float  # of the gateway's process, requests and answers included
    direct: Delays
    relay: Delays
    through: Delays


class _Samples:
    def __init__(self) -> None:
        self.request_ms: list[float] = []
        self.event_ms: list[float] = []

    def delays(self) -> Delays:
        return Delays(request_ms=Spread.of(self.request_ms), event_ms=Spread.of(self.event_ms))


def measure_gateway(num_streams: int) -> GatewayReport:
    """Streams begin evenly over the time that one of them takes; each is followed by another."""
    direct, relayed, through = _Samples(), _Samples(), _Samples()
    spent_s = 0.0
    with _engines() as urls, _relay(urls) as relay, tempfile.TemporaryDirectory() as folder:
        flags = [word for url in urls for word in ("--engine", url)]
        with (
            serving(flags, Path(folder) / "gateway.log") as gateway,
            _apart(gateway.pid, relay.pid),
        ):
            for _ in range(NUM_ROUNDS):
                uvloop.run(_load(urls, num_streams, direct))
                uvloop.run(_load([relay.url], num_streams, relayed))
                before_s = cpu_s(gateway.pid)
                uvloop.run(_load([gateway.url], num_streams, through))
                spent_s += cpu_s(gateway.pid) - before_s
    return GatewayReport(
        num_streams=num_streams,
        events_per_s=num_streams / PACE_S,
        cpu_us_per_event=spent_s * 1e6 / len(through.event_ms),
        direct=direct.delays(),
        relay=relayed.delays(),
        through=through.delays(),
    )


def cpu_s(pid: int) -> float:
    """Time on a processor that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _apart(*pids: int) -> Iterator[None]:
    """These processes on a core that nothing else here uses; only where there are others."""
    cores = sorted(os.sched_getaffinity(0))
    family = [os.getpid(), *_children()] if len(cores) > 1 else []
    try:
        for one in family:
            os.sched_setaffinity(one, {cores[-1]} if one in pids else set(cores[:-1]))
        yield
    finally:
        if family:
            os.sched_setaffinity(0, cores)


def _children() -> list[int]:
    task = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(word) for word in task.read_text().split()]


class _Part(NamedTuple):
    """A process of this benchmark that answers at a URL."""

    url: str
    pid: int


@contextmanager
def _engines() -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [stack.enter_context(_part("pacer")).url for _ in range(NUM_ENGINES)]


@contextmanager
def _relay(urls: Sequence[str]) -> Iterator[_Part]:
    with _part("relay", *(url.rpartition(":")[2] for url in urls)) as part:
        yield part


@contextmanager
def _part(module: str, *words: str) -> Iterator[_Part]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", f"headrace.bench.{module}", str(port), *words]
    with subprocess.Popen(command) as process:
        try:
            until_s = time.perf_counter() + START_TIMEOUT_S
            while not is_ready(url):
                if time.perf_counter() > until_s:
                    raise HeadraceError(f"the {module} did not start")
                time.sleep(0.05)
            yield _Part(url, process.pid)
        finally:
            process.kill()


async def _load(urls: Sequence[str], num_streams: int, samples: _Samples) -> None:
    """Each of the streams twice, one after the other, so that for a while all are under way."""
    each_s = NUM_EVENTS * PACE_S

    async def client(number: int) -> None:
        await asyncio.sleep(each_s * number / num_streams)
        for _ in range(2):
            await _read_stream(urls[number % len(urls)], number, samples)

    async with asyncio.TaskGroup() as clients:
        for number in range(num_streams):
            clients.create_task(client(number))


class _Reader(asyncio.Protocol):
    """Reads a stream with as little work as there can be: its own delay is in the figures too."""

    def __init__(self, request: bytes, samples: _Samples) -> None:
        self.is_over = asyncio.get_running_loop().create_future()
        self._request = request
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
        for moment in _MOMENT.findall(data, 0, end if end > 1 else 0):
            if self._is_first:
                self._is_first = False
                self._samples.request_ms.append((int(moment) - self._sent_ns) / 1e6)
            else:
                self._samples.event_ms.append((read_ns - int(moment)) / 1e6)
        if b"[DONE]" in data and not self.is_over.done():
            self.is_over.set_result(True)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_over.done():
            self.is_over.set_result(False)


async def _read_stream(url: str, number: int, samples: _Samples) -> None:
    body = msgspec.json.encode({"model": MODEL, "prompt": f"{number} {PROMPT}", "stream": True})
    host, _, port = url.removeprefix("http://").partition(":")
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    transport, reader = await loop.create_connection(
        lambda: _Reader(head.encode() + body, samples), host, int(port)
    )
    is_whole = await reader.is_over
    transport.close()
    if not is_whole:
        raise HeadraceError("a stream broke off", url=url)
