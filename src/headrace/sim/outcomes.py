"""What became of each request of a recording: as it was recorded, or in a simulation of it.

Decides which figures are compared; refuses to compare them.
"""

from array import array
from collections import Counter
from typing import Final

import msgspec

from headrace.core.base.metrics import Metric, find_excesses, is_good, tpot_ns
from headrace.core.base.request import FinishReason, Slo
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns
from headrace.core.telemetry import RequestRecord
from headrace.core.telemetry.fold import merge_slo
from headrace.core.workload.recording import REJECTED, Recorded, Recording
from headrace.sim.cluster import ClusterReport

NAN: Final = float("nan")
LATENCIES: Final = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")

Miss = tuple[str, str]
"""A limit's metric and the cause."""


class Outcomes:
    """By the places of requests in the recording. Times that nobody measured are NaN."""

    def __init__(self, num_requests: int) -> None:
        self.good = bytearray(num_requests)
        self.is_served = bytearray(num_requests)
        self.latencies = {name: array("d", [NAN]) * num_requests for name in LATENCIES}
        self.prompt_tokens = array("Q", [0]) * num_requests
        self.cached_tokens = array("Q", [0]) * num_requests
        self.output_tokens = array("Q", [0]) * num_requests
        self.misses: Counter[Miss] = Counter()
        self.num_workers = 0.0  # on average
        self.num_preemptions = 0
        self.end_s = 0.0
        self.trace_hash = ""
        self.beyond: set[str] = set()  # what of its steps was never measured, in words

    def __len__(self) -> int:
        return len(self.good)

    def add(self, record: RequestRecord) -> None:
        """Of a simulation, in which a request's name is its place."""
        place = int(record.request_id)
        self._set(
            place,
            {
                "ttft_ms": record.ttft_ns,
                "tpot_ms": record.tpot_ns,
                "itl_ms": record.max_itl_ns,
                "e2e_ms": record.e2e_ns,
            },
        )
        self.good[place] = record.good
        self.prompt_tokens[place] = record.num_prompt_tokens
        self.cached_tokens[place] = record.num_cached_tokens
        self.output_tokens[place] = record.num_output_tokens
        self.num_preemptions += record.num_preemptions
        self.misses.update((miss.metric.value, miss.cause.value) for miss in record.misses)

    def note(self, report: ClusterReport) -> None:
        """What is known at the end of a simulation."""
        up_ns = sum(worker.up_ns for worker in report.workers)
        self.num_workers = up_ns / max(1, report.end_ns)
        self.end_s = report.end_ns / NS_PER_S
        self.trace_hash = report.trace_hash

    def _set(self, place: int, times_ns: dict[str, Ns | float | None]) -> None:
        self.is_served[place] = 1
        for name, time_ns in times_ns.items():
            if time_ns is not None:
                self.latencies[name][place] = time_ns / NS_PER_MS


class _Was(msgspec.Struct, frozen=True):
    """A recorded request, as limits judge it."""

    reason: FinishReason
    num_output_tokens: int
    ttft_ns: Ns | None
    max_itl_ns: Ns | None
    tpot_ns: float | None
    e2e_ns: Ns


def recorded_outcomes(recording: Recording, default: Slo) -> Outcomes:
    """As it was, judged by these limits where requests stated none."""
    outcomes = Outcomes(len(recording.requests))
    for place, one in enumerate(recording.requests):
        if one.end != REJECTED and one.e2e_ns is not None:
            _add_recorded(outcomes, place, one, merge_slo(one.slo or Slo(), default))
    ends = (one.arrived_ns + (one.e2e_ns or 0) for one in recording.requests)
    end_ns = max(ends, default=0)
    first_ns = recording.requests[0].arrived_ns if recording.requests else 0
    outcomes.end_s = (end_ns - first_ns) / NS_PER_S
    outcomes.num_workers = _mean_workers(recording, end_ns)
    return outcomes


def _add_recorded(outcomes: Outcomes, place: int, one: Recorded, slo: Slo) -> None:
    assert one.e2e_ns is not None
    tpot = None
    if one.ttft_ns is not None:
        tpot = tpot_ns(one.e2e_ns, one.ttft_ns, one.output_tokens)
    was = _Was(
        FinishReason(one.end), one.output_tokens, one.ttft_ns, one.max_itl_ns, tpot, one.e2e_ns
    )
    times = {
        "ttft_ms": was.ttft_ns,
        "tpot_ms": tpot,
        "itl_ms": was.max_itl_ns,
        "e2e_ms": was.e2e_ns,
    }
    outcomes._set(place, times)
    outcomes.good[place] = is_good(was, slo)
    outcomes.prompt_tokens[place] = one.prompt_tokens
    outcomes.cached_tokens[place] = one.cached_tokens
    outcomes.output_tokens[place] = one.output_tokens
    outcomes.num_preemptions += one.num_preemptions
    causes = dict(zip(Metric, one.causes, strict=False))
    outcomes.misses.update(
        (miss.metric.value, causes[miss.metric].value)
        for miss in find_excesses(was, slo)
        if miss.metric in causes
    )


def _mean_workers(recording: Recording, end_ns: int) -> float:
    """Over the time from the first that is known of them."""
    looks = [(one.at_ns, sum(pool.num_workers for pool in one.pools)) for one in recording.pools]
    if not looks:
        return 0.0
    ends = [*(at_ns for at_ns, _ in looks[1:]), max(end_ns, looks[-1][0])]
    spent = [(until - at_ns, number) for (at_ns, number), until in zip(looks, ends, strict=True)]
    total_ns = sum(ns for ns, _ in spent)
    if total_ns <= 0:
        return float(looks[-1][1])
    return sum(ns * number for ns, number in spent) / total_ns
