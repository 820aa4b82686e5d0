"""What the gateway records of a request: what the router knew of it, and what its client saw.

Refuses to guess what an engine computed: a stream's events stand for tokens, and an answer that
comes whole has as many as nobody knows.
"""

import time
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

from headrace.cluster.gateway.ask import TOKENS_PER_BLOCK, Ask
from headrace.core.base.request import FinishReason, Slo
from headrace.core.base.types import Ns
from headrace.core.config.schema import Config
from headrace.core.workload.recording import REJECTED, Begin, Namer, Recorded
from headrace.live.traffic import Facts, TrafficRecorder
from headrace.server.exchange import CLIENT_GONE


def facts_of(config: Config) -> Facts:
    """Nothing is known of what the engines are."""
    begin = Begin(
        block_tokens=TOKENS_PER_BLOCK,
        router=config.router,
        max_migrations=config.cluster.max_migrations,
        slo=config.telemetry.slo,
    )
    return Facts(begin=begin, look=lambda: ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """How a request ended, as its client saw it."""

    arrived_ns: int
    first_byte_ns: int | None  # None = no engine answered
    status: int
    is_broken: bool  # it ended with an error after its first byte
    num_events: int  # of a stream; 0 where it was none


def record(recorder: TrafficRecorder, number: int, ask: Ask, slo: Slo, answered: Answered) -> None:
    make = partial(_line, number, ask, slo, answered, time.monotonic_ns(), recorder.began_ns)
    recorder.add(make, TOKENS_PER_BLOCK * len(ask.block_names))


def _line(
    number: int, ask: Ask, slo: Slo, answered: Answered, now: int, began_ns: Ns, namer: Namer
) -> Recorded:
    end = _end(answered)
    waited_ns = None
    if answered.first_byte_ns is not None and end != REJECTED:
        waited_ns = Ns(answered.first_byte_ns - answered.arrived_ns)
    return Recorded(
        request=number,
        arrived_ns=Ns(max(0, answered.arrived_ns - began_ns)),
        prompt_tokens=ask.num_tokens,
        output_tokens=0 if end == REJECTED else min(answered.num_events, ask.max_tokens),
        max_tokens=max(1, ask.max_tokens),
        # The router's names are hashes of the text, which whoever guesses it could make too.
        blocks=b"".join(map(namer.name, ask.block_names)),
        priority=ask.priority,
        slo=None if slo == Slo() else slo,
        end=end,
        code=str(answered.status or "") if end == REJECTED else "",
        ttft_ns=waited_ns,
        e2e_ns=None if end == REJECTED else Ns(now - answered.arrived_ns),
    )


def _end(answered: Answered) -> str:
    if answered.is_broken:
        return FinishReason.ERROR.value
    if answered.status == CLIENT_GONE:
        return FinishReason.CANCELLED.value
    return FinishReason.STOP.value if answered.status == HTTPStatus.OK else REJECTED
