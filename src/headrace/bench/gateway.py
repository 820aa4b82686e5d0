"""What a gateway adds to the time that a stream's bytes take, at many streams at once.

The same load goes straight to engines that compute nothing, through a relay that does nothing, and
through a gateway, in turns; what is added is the difference of the distributions. The relay's part
is what any process in that place adds. Where there are two cores or more, gateway and relay have
one of them, and engines and clients share the others in all turns: so what they cost each other is
no part of what is added.
"""

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import msgspec
import uvloop

from headrace.bench.pacer import MODEL, NUM_EVENTS, PACE_S
from headrace.bench.server import Served, serving, serving_module
from headrace.bench.streams import Delays, Load, Samples, apart, cpu_s

PROMPT = "The water of the headrace drives the wheel of the mill. " * 40  # 2.2 kB, 8 blocks
NUM_ENGINES = 2
NUM_ROUNDS = 2
_MOMENT = re.compile(rb'"ns":(\d+)')


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    num_streams: int
    events_per_s: float
    cpu_us_per_event: float  # of the gateway's process, requests and answers included
    direct: Delays
    relay: Delays
    through: Delays


def measure_gateway(num_streams: int, num_rounds: int = NUM_ROUNDS) -> GatewayReport:
    direct, relayed, through = Samples(), Samples(), Samples()
    load = Load(_body, _ages, NUM_EVENTS * PACE_S)
    spent_s = 0.0
    with _engines() as urls, _relay(urls) as relay, tempfile.TemporaryDirectory() as folder:
        flags = [word for url in urls for word in ("--engine", url)]
        with (
            serving(flags, Path(folder) / "gateway.log") as gateway,
            apart(gateway.pid, relay.pid),
        ):
            for _ in range(num_rounds):
                uvloop.run(load.run(urls, num_streams, direct))
                uvloop.run(load.run([relay.url], num_streams, relayed))
                before_s = cpu_s(gateway.pid)
                uvloop.run(load.run([gateway.url], num_streams, through))
                spent_s += cpu_s(gateway.pid) - before_s
    return GatewayReport(
        num_streams=num_streams,
        events_per_s=num_streams / PACE_S,
        cpu_us_per_event=spent_s * 1e6 / len(through.event_ms),
        direct=direct.delays(),
        relay=relayed.delays(),
        through=through.delays(),
    )


@contextmanager
def _engines() -> Iterator[list[str]]:
    with ExitStack() as stack:
        parts = (serving_module("headrace.bench.pacer") for _ in range(NUM_ENGINES))
        yield [stack.enter_context(part).url for part in parts]


def _relay(urls: Sequence[str]) -> AbstractContextManager[Served]:
    return serving_module("headrace.bench.relay", *(url.rpartition(":")[2] for url in urls))


def _body(number: int) -> bytes:
    return msgspec.json.encode({"model": MODEL, "prompt": f"{number} {PROMPT}", "stream": True})


def _ages(events: bytes, read_ns: int) -> list[int]:
    return [read_ns - int(moment) for moment in _MOMENT.findall(events)]
