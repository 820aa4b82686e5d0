"""Claims about Mooncake's conversation trace (FAST 2025): what caches find, and what routing and
disaggregation make of it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from headrace.core.base.request import Slo
from headrace.core.telemetry import RequestRecord
from headrace.core.workload.profiles import AGENT
from headrace.core.workload.replay import TraceSource
from headrace.core.workload.traces import TraceRequest, spread
from headrace.plan.fleet import Kind, Shape
from headrace.plan.queueing import CHUNKED
from headrace.sim.capacity import Crew, largest_rate, serve, share_is_good
from headrace.sim.claims import GPU, WHOLE, Claim, Effort, cost_of, device, gain, split
from headrace.sim.fleet_trial import Fleet, Traffic, shareable
from headrace.sim.routing import compare_policies
from headrace.sim.setup import VOCAB

CAPACITIES: Final = (1_000, 10_000, 50_000)  # blocks
BLOCK_SIZE: Final = 64
TRACE_SPEED: Final = 4.0


def hits(effort: Effort) -> Iterator[Claim]:
    """Counted over the whole trace, with one cache."""
    by_capacity = ", ".join(
        f"{capacity:,} blocks {block_hits(effort.trace, capacity):.1%}" for capacity in CAPACITIES
    )
    yield Claim(
        name="Mooncake, tokens that caches could hold",
        published="37.4 %",
        ours=shareable(effort.trace) * 100.0,
        unit="%",
        setting=f"{len(effort.trace):,} requests, one cache without limit; with the least recently "
        f"used block given up, of blocks: {by_capacity}",
        gap="none: it is counted",
    )


def block_hits(trace: Sequence[TraceRequest], capacity: int) -> float:
    """The share of blocks that a cache of so many finds, which gives up the least recently used."""
    held: OrderedDict[int, None] = OrderedDict()
    num_found = num_all = 0
    for one in trace:
        is_prefix = True
        for block in one.blocks:
            num_all += 1
            is_prefix = is_prefix and block in held
            num_found += is_prefix
        for block in one.blocks:
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
    return num_found / max(1, num_all)


def routing(effort: Effort) -> Iterator[Claim]:
    """Eight workers, the same requests, two policies, as in the A/B test of Dynamo's guide:
    sessions of agents, and the trace where there is one.
    """
    sessions = Traffic(profile=AGENT, load_per_s=50.0, num_requests=effort.num_requests)
    traffics = {"sessions of agents, 50 requests/s": sessions}
    if effort.trace:
        trace = [
            msgspec.structs.replace(one, arrival_s=one.arrival_s / TRACE_SPEED)
            for one in effort.trace[: effort.num_requests]
        ]
        words = f"the trace's first {len(trace)} requests, {TRACE_SPEED:g} times as fast"
        traffics[words] = Traffic.of_trace(trace, Slo(ttft_ms=10_000.0))
    for words, traffic in traffics.items():
        fleet = Fleet(
            shape=Shape(decode=Kind(cost_of("Meta-Llama-3.1-8B", "H100 SXM", 1)), mode=CHUNKED),
            prefill_workers=0,
            decode_workers=8,
            policy="kv",
            step_tokens=2048,
            block_size=BLOCK_SIZE,
        )
        kv, turns = compare_policies(fleet, traffic, (effort.seed,), ("kv", "round_robin"))
        yield Claim(
            name="KV-aware routing, " + ("sessions" if traffic is sessions else "trace"),
            published="2× in TTFT",
            ours=turns.ttft_mean_ms.mean / kv.ttft_mean_ms.mean,
            unit="×",
            setting=f"Llama-3.1-8B on 8 H100s, {words}: mean TTFT "
            f"{turns.ttft_mean_ms.mean:,.0f} ms by round robin, which finds "
            f"{turns.hit_rate.mean:.1%}, {kv.ttft_mean_ms.mean:,.0f} ms by `kv`, which finds "
            f"{kv.hit_rate.mean:.1%} of {traffic.demand.cached_share:.1%}",
            gap="it grows with what requests share, with the room for it, and with the load",
        )


def mooncake(effort: Effort) -> Iterator[Claim]:
    """How much faster the trace may come until a tenth of the requests break a limit."""
    trace = spread(effort.trace[: effort.num_requests], effort.seed)
    slo = Slo(ttft_ms=30_000.0, tpot_ms=100.0)
    machine = device("meta-llama/Llama-2-70b", GPU, 8, block_size=BLOCK_SIZE)
    whole = Crew(device=machine, num_workers=4, step_tokens=4 * WHOLE, num_gpus=8)
    chunks = msgspec.structs.replace(whole, step_tokens=512)
    speeds = {
        name: trace_speed(crews, policy, trace, slo)
        for name, crews, policy in (
            ("together", [whole], "least_loaded"),
            ("3P:1D", split(machine, 3, 1, 8), "kv"),
            ("chunks", [chunks], "least_loaded"),
        )
    }
    yield Claim(
        name="Mooncake, requests within limits",
        published="1.75×",
        ours=gain(speeds, "3P:1D"),
        unit="×",
        setting=f"Llama-2-70B on 4 machines of 8 A100s, the first {len(trace)} requests, TTFT 30 "
        "s, TPOT 100 ms, 90 %: the trace may come "
        + ", ".join(f"{speed:.2f} times as fast ({name})" for name, speed in speeds.items()),
        gap="published of Kimi's own traffic and machines; here no lower tiers hold KV, and a run "
        "is short against a limit of 30 s",
    )


def trace_speed(
    crews: Sequence[Crew], policy: str, trace: Sequence[TraceRequest], slo: Slo
) -> float:
    def is_good(speed: float) -> bool:
        source = TraceSource(trace, slo=slo, speed=speed, vocab_size=VOCAB)

        def run(note: Callable[[RequestRecord], None]) -> object:
            return serve(crews, source, slo=slo, policy=policy, on_record=note)

        return share_is_good(run, len(trace), 0.9)

    return largest_rate(is_good, start=1.0)
