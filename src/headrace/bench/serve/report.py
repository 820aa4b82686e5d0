"""A run's outcomes as figures.

Decides which requests count, over which time rates are taken, and when a run is no measurement.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from headrace.bench.serve.asked import Rules, Traffic
from headrace.bench.serve.client_watch import ClientFacts
from headrace.bench.serve.intervals import Distribution, Estimate, share_estimate
from headrace.bench.serve.outcome import Latencies, Outcome
from headrace.bench.serve.server_facts import ServerFacts
from headrace.bench.serve.verdict import faults_of, sessions_began, warnings_of
from headrace.core.base.metrics import find_excesses, is_good, itl_ns, per_second
from headrace.core.base.request import Slo
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies from one moment on: when a request was due, or when it was sent."""

    num_good: int
    attainment: Estimate  # good of all that were counted; errors are not good
    goodput_per_s: Estimate | None
    num_misses_by_metric: dict[str, int]
    ttft_ms: Distribution
    e2e_ms: Distribution


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Latencies are those of whole answers; the rest of the counted requests failed."""

    num_sent: int
    num_counted: int  # due after the warm-up
    num_failed_by_fault: dict[str, int]
    fault_examples: dict[str, str]
    num_single_token: int  # which have no TPOT
    window_s: float  # that rates are taken over
    load_per_s: float | None  # counted requests; None = they came at once
    finished_per_s: float
    output_tokens_per_s: float
    good_output_tokens_per_s: float
    num_prompt_tokens: int | None  # by the server's count
    num_output_tokens: int
    tokens_per_event: float | None
    cached_share: float | None  # of prompt tokens, by the answers' own usage
    since_due: View
    since_sent: View
    tpot_ms: Distribution
    itl_ms: Distribution  # gaps between events
    lag_ms: Distribution  # from due to sent
    client: ClientFacts
    server: ServerFacts | None
    faults: list[str]  # reasons why this is no measurement; none = it is one
    warnings: list[str]


class Window(msgspec.Struct, frozen=True):
    """Where rates are taken: what comes before and after belongs to filling up and draining."""

    begin_ns: Ns
    end_ns: Ns

    @classmethod
    def of(cls, counted: Sequence[Outcome], traffic: Traffic) -> "Window":
        """From the first counted request to the last one, where they come at times of their own,
        and else to the last end.
        """
        if not counted:
            return cls(Ns(0), Ns(0))
        begin_ns = min(one.due_ns for one in counted)
        last_ns = max(one.due_ns for one in counted)
        if traffic.is_closed or traffic.is_burst or last_ns == begin_ns:
            last_ns = max(one.ended_ns for one in counted)
        return cls(begin_ns, last_ns)

    @property
    def length_ns(self) -> Ns:
        return Ns(self.end_ns - self.begin_ns)

    def rate(self, times_ns: Sequence[int]) -> float:
        inside = sum(self.begin_ns <= at_ns <= self.end_ns for at_ns in times_ns)
        return per_second(inside, self.length_ns)


def counted_of(outcomes: Sequence[Outcome], rules: Rules) -> list[Outcome]:
    """Those due after the warm-up, in the order in which they were due."""
    warm_up_ns = rules.warm_up_s * NS_PER_S
    return sorted((one for one in outcomes if one.due_ns >= warm_up_ns), key=lambda one: one.due_ns)


def load_of(counted: Sequence[Outcome], window: Window, traffic: Traffic) -> float | None:
    """Requests per second. n arrivals have n - 1 gaps between them."""
    if traffic.is_burst or len(counted) < 2:
        return None
    num = len(counted) if traffic.is_closed else len(counted) - 1
    return per_second(num, window.length_ns)


def report_of(
    outcomes: Sequence[Outcome],
    traffic: Traffic,
    rules: Rules,
    client: ClientFacts,
    server: ServerFacts | None,
    *,
    num_left: int = 0,
) -> Report:
    """`num_left` requests were under way when the run was ended, and are in no outcome."""
    counted = counted_of(outcomes, rules)
    whole = [one for one in counted if not one.fault]
    window = Window.of(counted, traffic)
    load = load_of(counted, window, traffic)
    told = [one for one in whole if one.num_prompt_tokens is not None]
    cached = [one for one in told if one.num_cached_tokens is not None]
    num_output = sum(one.num_output_tokens for one in whole)
    since_due = view_of(counted, rules.slo, load, lambda one: one.due_ns)
    good = (one for one in whole if is_good(Latencies.since(one.due_ns, one), rules.slo))
    num_good_tokens = sum(one.num_output_tokens for one in good)
    return Report(
        num_sent=len(outcomes),
        num_counted=len(counted),
        num_failed_by_fault=dict(Counter(one.fault for one in counted if one.fault).most_common()),
        fault_examples={one.fault: one.detail for one in reversed(counted) if one.fault},
        num_single_token=sum(one.num_output_tokens == 1 for one in whole),
        window_s=window.length_ns / NS_PER_S,
        load_per_s=load,
        finished_per_s=window.rate([one.ended_ns for one in whole]),
        output_tokens_per_s=_token_rate(whole, window),
        good_output_tokens_per_s=per_second(num_good_tokens, window.length_ns),
        num_prompt_tokens=sum(one.num_prompt_tokens or 0 for one in told) if told else None,
        num_output_tokens=num_output,
        tokens_per_event=_share(num_output, sum(one.num_events for one in whole)),
        cached_share=_share(
            sum(one.num_cached_tokens or 0 for one in cached),
            sum(one.num_prompt_tokens or 0 for one in cached),
        ),
        since_due=since_due,
        since_sent=view_of(counted, rules.slo, load, lambda one: one.sent_ns),
        tpot_ms=_milliseconds([Latencies.since(one.sent_ns, one).tpot_ns for one in whole]),
        itl_ms=_milliseconds([gap for one in whole for gap in itl_ns(map(Ns, one.token_times_ns))]),
        lag_ms=_milliseconds([max(0, one.lag_ns) for one in counted]),
        client=client,
        server=server,
        faults=faults_of(counted, rules, client),
        warnings=warnings_of(outcomes, counted, client, None if num_left else server)
        + sessions_began(load, traffic),
    )


def view_of(
    counted: Sequence[Outcome],
    slo: Slo,
    load_per_s: float | None,
    begin_of: Callable[[Outcome], Ns],
) -> View:
    """Goodput is the attained share of the load, so that both have one interval."""
    latencies = [Latencies.since(begin_of(one), one) for one in counted]
    are_good = [is_good(one, slo) for one in latencies]
    whole = [late for late, one in zip(latencies, counted, strict=True) if not one.fault]
    misses = Counter(miss.metric.value for one in whole for miss in find_excesses(one, slo))
    attainment = share_estimate(are_good)
    return View(
        num_good=sum(are_good),
        attainment=attainment,
        goodput_per_s=None if load_per_s is None else attainment.scaled(load_per_s),
        num_misses_by_metric=dict(misses.most_common()),
        ttft_ms=_milliseconds([one.ttft_ns for one in whole]),
        e2e_ms=_milliseconds([one.e2e_ns for one in whole]),
    )


def _token_rate(whole: Sequence[Outcome], window: Window) -> float:
    """Events within the window, each with as many tokens as its answer's have on average."""
    num = 0.0
    for one in whole:
        inside = sum(window.begin_ns <= at_ns <= window.end_ns for at_ns in one.token_times_ns)
        num += inside * one.num_output_tokens / max(1, one.num_events)
    return per_second(num, window.length_ns)


def _milliseconds(values_ns: Sequence[float | None]) -> Distribution:
    return Distribution.of([value / NS_PER_MS for value in values_ns if value is not None])


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
