"""What a front end adds to the time that requests and tokens take, beside a server of one process.

The same load goes to both, in turns, over engines that compute nothing (`clocked`); what is added
is the difference of the distributions. Where there are two cores or more, the server's own process
has one of them, and its workers and the clients share the others.
"""

import re

import msgspec
import uvloop

from headrace.bench.clocked import MODULE, PACE_S, Moments
from headrace.bench.pacer import NUM_EVENTS
from headrace.bench.server import serving_module
from headrace.bench.streams import Delays, Load, Samples, apart, cpu_s
from headrace.models.hub import resolve_model
from headrace.models.load import load_text

PROMPT = "The water of the headrace drives the wheel of the mill. " * 10  # 140 tokens
NUM_ROUNDS = 2
_TOKENS = re.compile(rb'"token_ids":\[(\d+)\]')


class FrontReport(msgspec.Struct, frozen=True, kw_only=True):
    num_workers: int
    num_streams: int
    events_per_s: float
    alone_cpu_us_per_event: float  # of the one process, its engine included
    cpu_us_per_event: float  # of the front end
    alone: Delays
    through: Delays


def measure_front(num_workers: int, num_streams: int, num_rounds: int = NUM_ROUNDS) -> FrontReport:
    text = load_text(resolve_model(""))
    moments = Moments(text.tokenizer)
    text.close()

    def ages(events: bytes, read_ns: int) -> list[int]:
        return [moments.since_ns(int(token), read_ns) for token in _TOKENS.findall(events)]

    load = Load(_body, ages, NUM_EVENTS * PACE_S)
    samples, spent_s = (Samples(), Samples()), [0.0, 0.0]
    for _ in range(num_rounds):
        for index in range(2):
            # One after the other, since the machine has memory for one of them at a time.
            workers = str(num_workers if index else 0)
            with serving_module(MODULE, workers) as server, apart(server.pid):
                before_s = cpu_s(server.pid)
                uvloop.run(load.run([server.url], num_streams, samples[index]))
                spent_s[index] += cpu_s(server.pid) - before_s
    alone, through = samples
    return FrontReport(
        num_workers=num_workers,
        num_streams=num_streams,
        events_per_s=num_streams / PACE_S,
        alone_cpu_us_per_event=spent_s[0] * 1e6 / len(alone.event_ms),
        cpu_us_per_event=spent_s[1] * 1e6 / len(through.event_ms),
        alone=alone.delays(),
        through=through.delays(),
    )


def _body(number: int) -> bytes:
    asked = {
        "prompt": f"{number} {PROMPT}",
        "max_tokens": NUM_EVENTS + 1,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    return msgspec.json.encode(asked)
