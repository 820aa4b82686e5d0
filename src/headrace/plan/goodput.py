"""How much load keeps its limits: prefill and decode on the same workers, or on their own.

Two kinds of models of mean latencies over the same service times: the fitted one of a teaching
page (page.py) and closed forms from queueing theory (queueing.py). Neither knows the spread, so a
mean that keeps the limit counts as good, and beyond it nothing does.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from math import floor

import msgspec

from headrace.core.base.request import Slo
from headrace.plan import page, queueing
from headrace.plan.service import Latencies, ServiceTimes, Split, find_excess

CURVE_POINTS = 60
BISECTIONS = 60
PAGE, CLOSED_FORM = "page", "closed form"

LatenciesAt = Callable[[float], Latencies | None]
"""The mean latencies at a load in requests per second; None = more arrives than is served."""


class Candidate(msgspec.Struct, frozen=True):
    """One way to serve, as one model sees it."""

    model: str
    mode: str
    latencies_at: LatenciesAt
    split: Split | None = None
    grid_per_s: float | None = None  # that sustainable loads are rounded down to


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a candidate does at the load that was asked about, and at most."""

    model: str
    mode: str
    prefill_workers: float | None
    decode_workers: float | None
    ttft_s: float | None  # at the load; None = overloaded
    tpot_s: float | None
    decode_seqs: float | None  # that decode together on one worker
    is_good: bool
    sustainable_per_s: float  # the largest load that keeps every limit
    binds: str  # what breaks beyond it: ttft, tpot, e2e or capacity
    goodput_per_s_by_load: tuple[tuple[float, float], ...]


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    load_per_s: float
    num_workers: int
    prompt_tokens: int
    output_tokens: int
    slo: Slo
    prefill_worker_s_per_request: float
    decode_worker_s_per_request: float
    design_batch_seqs: int
    design_step_s: float
    capacity_per_s: float  # all workers always busy at the design batch
    utilisation: float
    kv_transfer_bytes_per_request: float
    verdicts: tuple[Verdict, ...]
    gain_by_model: dict[str, float]  # disaggregated to co-located with prefill first


def compute_goodput(
    service: ServiceTimes, slo: Slo, load_per_s: float, *, with_page: bool
) -> Goodput:
    candidates = list(closed_form_candidates(service, slo))
    if with_page:
        candidates = [*page_candidates(service), *candidates]
    bests = [find_sustainable(one, slo, service) for one in candidates]
    top = 1.5 * max(load_per_s, *(best for best, _ in bests))
    loads = [top * (i + 1) / CURVE_POINTS for i in range(CURVE_POINTS)]
    verdicts = tuple(
        judge(one, slo, service, load_per_s, best, loads)
        for one, best in zip(candidates, bests, strict=True)
    )
    return Goodput(
        load_per_s=load_per_s,
        num_workers=service.num_workers,
        prompt_tokens=service.prompt_tokens,
        output_tokens=service.output_tokens,
        slo=slo,
        prefill_worker_s_per_request=service.prefill_s,
        decode_worker_s_per_request=service.decode_s,
        design_batch_seqs=service.design_batch_seqs,
        design_step_s=service.design_step_s,
        capacity_per_s=service.capacity_per_s,
        utilisation=load_per_s / service.capacity_per_s,
        kv_transfer_bytes_per_request=service.kv_transfer_bytes,
        verdicts=verdicts,
        gain_by_model=gains(verdicts),
    )


def page_candidates(service: ServiceTimes) -> Iterable[Candidate]:
    grid = page.LOAD_GRID_PER_S
    yield Candidate(PAGE, queueing.PREFILL_FIRST, service.bind(page.colocated), None, grid)
    split = service.balanced_split
    yield Candidate(PAGE, queueing.SPLIT, service.bind(page.disaggregated), split, grid)


def closed_form_candidates(service: ServiceTimes, slo: Slo) -> Iterable[Candidate]:
    """Whole workers as split by the best of all splits; the balanced one takes them in parts."""
    yield Candidate(CLOSED_FORM, queueing.PREFILL_FIRST, service.bind(queueing.prefill_first))
    yield Candidate(CLOSED_FORM, queueing.CHUNKED, service.bind(queueing.chunked))
    if service.num_workers < 2:
        return
    yield split_candidate(service, service.balanced_split)
    whole = [
        split_candidate(service, Split(num, service.num_workers - num))
        for num in range(1, service.num_workers)
    ]
    yield max(whole, key=lambda one: find_sustainable(one, slo, service)[0])


def split_candidate(service: ServiceTimes, split: Split) -> Candidate:
    def latencies_at(load_per_s: float) -> Latencies | None:
        return queueing.disaggregated(service, load_per_s, split)

    return Candidate(CLOSED_FORM, queueing.SPLIT, latencies_at, split)


def excess_of(latencies: Latencies | None, slo: Slo, output_tokens: int) -> str:
    """What the means break: the first limit, or capacity; "" = nothing."""
    if latencies is None:
        return "capacity"
    return find_excess(slo, latencies.ttft_s, latencies.tpot_s, output_tokens)


def find_sustainable(one: Candidate, slo: Slo, service: ServiceTimes) -> tuple[float, str]:
    """The largest load that keeps every limit, and what breaks beyond it.

    Latencies grow with the load, so halving an interval finds it; a grid rounds it down.
    """

    def excess_at(load_per_s: float) -> str:
        return excess_of(one.latencies_at(load_per_s), slo, service.output_tokens)

    low, high = 0.0, service.num_workers / service.prefill_s
    while not excess_at(high):
        high *= 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if excess_at(middle):
            high = middle
        else:
            low = middle
    binds = excess_at(high)
    if one.grid_per_s is not None:
        low = round(floor(low / one.grid_per_s + 1e-9) * one.grid_per_s, 9)
    return low, binds


def judge(
    one: Candidate,
    slo: Slo,
    service: ServiceTimes,
    load_per_s: float,
    best: tuple[float, str],
    loads: Sequence[float],
) -> Verdict:
    found = one.latencies_at(load_per_s)
    sustainable_per_s, binds = best
    # The corner is a point of its own, so that a curve shows it wherever the others lie.
    corner = [(sustainable_per_s, sustainable_per_s), (sustainable_per_s, 0.0)]
    below = [(load, load) for load in loads if load < sustainable_per_s]
    above = [(load, 0.0) for load in loads if load > sustainable_per_s]
    return Verdict(
        model=one.model,
        mode=one.mode,
        prefill_workers=one.split.prefill_workers if one.split else None,
        decode_workers=one.split.decode_workers if one.split else None,
        ttft_s=found.ttft_s if found else None,
        tpot_s=found.tpot_s if found else None,
        decode_seqs=found.decode_seqs if found else None,
        is_good=not excess_of(found, slo, service.output_tokens),
        sustainable_per_s=sustainable_per_s,
        binds=binds,
        goodput_per_s_by_load=tuple(chain(below, corner, above)),
    )


def gains(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """The best split's sustainable load to that of co-located workers that prefill first."""
    best: dict[tuple[str, str], float] = {}
    for one in verdicts:
        key = one.model, one.mode
        best[key] = max(one.sustainable_per_s, best.get(key, 0.0))
    return {
        model: best[model, queueing.SPLIT] / most
        for (model, mode), most in best.items()
        if mode == queueing.PREFILL_FIRST and most > 0 and (model, queueing.SPLIT) in best
    }
