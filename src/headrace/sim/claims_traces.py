"""Claims about Mooncake's conversation trace (FAST 2025): what caches find, and what routing and
disaggregation make of it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from headrace.core.base.request import Slo
from headrace.core.base.types import NS_PER_MS
from headrace.core.cost.hardware import Layout
from headrace.core.telemetry import RequestRecord
from headrace.core.workload.profiles import AGENT
from headrace.core.workload.replay import TraceSource
from headrace.core.workload.traces import TraceRequest, spread
from headrace.plan.fleet import Kind, Shape
from headrace.plan.queueing import CHUNKED
from headrace.sim.capacity import Crew, serve
from headrace.sim.claims import GPU, WHOLE, Claim, Effort, cost_of, device
from headrace.sim.claims_apart import split
from headrace.sim.fleet_trial import Fleet, Traffic, shareable
from headrace.sim.routing import compare_policies
from headrace.sim.setup import VOCAB

CAPACITIES: Final = (1_000, 10_000, 50_000)  # blocks
BLOCK_SIZE: Final = 64


def hits(effort: Effort) -> Iterator[Claim]:
    """Counted over the whole trace, with one cache."""
    by_capacity = ", ".join(
        f"{capacity:,} blocks {block_hits(effort.trace, capacity):.1%}" for capacity in CAPACITIES
    )
    yield Claim(
        name="Mooncake, tokens that caches could hold",
        published="37.4 %",
        published_figures=(37.4,),
        ours=shareable(effort.trace) * 100.0,
        unit="%",
        setting=f"{len(effort.trace):,} requests, one cache without limit; with the least recently "
        f"used block given up, of blocks: {by_capacity}",
        source="Mooncake (FAST 2025), kvcache-ai/Mooncake, FAST25-release/traces",
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
    small = cost_of("Meta-Llama-3.1-8B", "H100 SXM")
    cases = [("sessions", "Llama-3.1-8B on 8 H100s, agents, 50 requests/s", small, sessions)]
    if effort.trace:
        trace = effort.trace[: effort.num_requests]
        words = f"Qwen3-32B on 8 workers of 2 H200s, the trace's first {len(trace)} requests"
        large = cost_of("Qwen3-32B", "H200 SXM", Layout(tp=2))
        cases.append(("trace", words, large, Traffic.of_trace(trace, Slo(ttft_ms=2_000.0))))
    for name, words, cost, traffic in cases:
        fleet = Fleet(
            shape=Shape(decode=Kind(cost), mode=CHUNKED),
            prefill_workers=0,
            decode_workers=8,
            policy="kv",
            step_tokens=2048,
            block_size=BLOCK_SIZE,
        )
        kv, turns = compare_policies(
            fleet, traffic, (effort.seed,), ("kv", "round_robin"), watching=effort.watching
        )
        yield Claim(
            name=f"KV-aware routing, {name}",
            published="2× in TTFT",
            published_figures=(2.0,),
            ours=turns.ttft_mean_ms.mean / kv.ttft_mean_ms.mean,
            unit="×",
            setting=f"{words}: mean TTFT {turns.ttft_mean_ms.mean:,.0f} ms by round robin, which "
            f"finds {turns.hit_rate.mean:.1%}, {kv.ttft_mean_ms.mean:,.0f} ms by `kv`, which finds "
            f"{kv.hit_rate.mean:.1%} of {traffic.demand.cached_share:.1%}",
            source="2× as it is quoted of NVIDIA Dynamo, whose workload is not published; model, "
            "workers and trace are those of its guides (docs.nvidia.com/dynamo: Qwen3-32B KV "
            "Routing A/B, KV Router A/B Testing)",
            gap="it grows with what requests share, with the room for it, and with the load",
        )


# ---- prompts apart


NUM_MACHINES: Final = 20
APART: Final = "10P:10D"
LIMITS: Final = Slo(ttft_ms=30_000.0, itl_ms=100.0)
LINK_BYTES_PER_S: Final = 100e9  # of a machine
# Mooncake sends the KV of a layer while the next one is computed: nothing of it is waited for.
HIDDEN_BYTES_PER_S: Final = 1e13


def mooncake(effort: Effort) -> Iterator[Claim]:
    """The trace as it came, on twenty machines: how many more requests keep both limits."""
    trace = spread(effort.trace[: effort.num_requests], effort.seed)
    machine = device("meta-llama/Llama-2-70b", GPU, 8, block_size=BLOCK_SIZE)
    whole = Crew(device=machine, num_workers=NUM_MACHINES, step_tokens=4 * WHOLE, num_gpus=8)
    chunks = msgspec.structs.replace(whole, step_tokens=512)
    half = NUM_MACHINES // 2
    apart_crews = split(machine, half, NUM_MACHINES - half, 8)
    kept = {
        name: Kept.of(effort, name, crews, policy, trace, link)
        for name, crews, policy, link in (
            ("together", [whole], "least_loaded", LINK_BYTES_PER_S),
            (APART, apart_crews, "kv", HIDDEN_BYTES_PER_S),
            (f"{APART} with KV sent after its prompt", apart_crews, "kv", LINK_BYTES_PER_S),
            ("in chunks of 512", [chunks], "least_loaded", LINK_BYTES_PER_S),
        )
    }
    apart, together = kept[APART].by_gap, kept["together"].by_gap
    yield Claim(
        name="Mooncake, requests within limits",
        published="1.75×",
        published_figures=(1.75,),
        ours=apart / together if together else float("inf"),
        unit="×",
        setting=f"Llama-2-70B on {NUM_MACHINES} machines of 8 A100s, the trace's first "
        f"{len(trace)} requests as they came, TTFT 30 s and every gap 100 ms: "
        + ", ".join(
            f"{name} {one.by_gap:.1%} ({one.by_mean:.1%} by the mean of gaps)"
            for name, one in kept.items()
        ),
        source="Mooncake (Qin et al., arXiv 2407.00079), section 8.1.3: 10P+10D keeps 100 %, "
        "20 of vLLM 57 % of the limit between tokens, 100 ms; A800s, Kimi's own trace",
        gap="published of another trace (7,590 tokens on average against 12,035), and whether a "
        "request is judged by its longest gap or by a share of them is not said; `kv` finds "
        "prefixes on prefill machines, where Mooncake has one pool of all memory",
    )


class Kept(msgspec.Struct, frozen=True):
    """Shares of requests that keep a limit between tokens, and 30 s to the first."""

    by_gap: float
    by_mean: float

    @classmethod
    def of(
        cls,
        effort: Effort,
        name: str,
        crews: Sequence[Crew],
        policy: str,
        trace: Sequence[TraceRequest],
        link_bytes_per_s: float,
    ) -> "Kept":
        by_gap = by_mean = 0
        ttft_ms, gap_ms = LIMITS.ttft_ms or 0.0, LIMITS.itl_ms or 0.0

        def note(record: RequestRecord) -> None:
            nonlocal by_gap, by_mean
            by_gap += record.good
            is_early = record.ttft_ns is not None and record.ttft_ns <= ttft_ms * NS_PER_MS
            by_mean += is_early and (record.tpot_ns or 0.0) <= gap_ms * NS_PER_MS

        source = TraceSource(trace, slo=LIMITS, vocab_size=VOCAB)
        with effort.watched(name, len(trace), note) as heard:
            serve(
                crews,
                source,
                slo=LIMITS,
                policy=policy,
                link_bytes_per_s=link_bytes_per_s,
                on_record=heard,
            )
        return cls(by_gap / len(trace), by_mean / len(trace))
