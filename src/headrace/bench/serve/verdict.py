"""Whether a run is a measurement, and what to beware of where it is."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from headrace.bench.serve.asked import Rules, Traffic
from headrace.bench.serve.client_watch import ClientFacts
from headrace.bench.serve.intervals import Distribution
from headrace.bench.serve.outcome import IMPOSSIBLE, Outcome
from headrace.bench.serve.server_facts import ServerFacts
from headrace.core.base.types import NS_PER_MS

MOST_IMPOSSIBLE: Final = 0.01  # share of answers
MOST_CPU: Final = 0.9  # share of a core
FEW_REQUESTS: Final = 100
BUFFERED_NS: Final = NS_PER_MS  # all events of an answer within this
LONG_ANSWER: Final = 8  # events
OFF_BY: Final = 0.1  # share of tokens
MUCH_LESS: Final = 0.7  # of the load that was asked for
TEMPLATE_TOKENS: Final = 64  # that a chat's template may add to a prompt
GONE: Final = "the server is gone: nobody answers at its address after the run"


def faults_of(counted: Sequence[Outcome], rules: Rules, client: ClientFacts) -> list[str]:
    """Why these figures say nothing of the server; none = they do."""
    faults = []
    num_whole = sum(not one.fault for one in counted)
    if not counted:
        faults.append("no request came after the warm-up")
    elif not num_whole:
        faults.append("no request was answered whole")
    lag_ms = Distribution.of([max(0, one.lag_ns) / NS_PER_MS for one in counted]).p99
    if lag_ms is not None and lag_ms.value > rules.max_lag_ms:
        faults.append(
            f"requests were sent late: p99 of the send lag is {lag_ms.value:.0f} ms, more than "
            f"{rules.max_lag_ms:g} ms"
        )
    if slow := slow_client(client, rules):
        faults.append(slow)
    reasons = Counter(one.detail for one in counted if one.fault == IMPOSSIBLE)
    if reasons.total() > MOST_IMPOSSIBLE * len(counted):
        reason, _ = reasons.most_common(1)[0]
        faults.append(f"{reasons.total()} of {len(counted)} answers cannot be: {reason}")
    return faults


def none_good(num_counted: int, num_good: int, faults: Sequence[str]) -> str:
    """Where every request failed or broke a limit, that is all a run can say, unless other faults
    say more; empty = one was good.
    """
    if num_good or not num_counted or faults:
        return ""
    return f"no request was good: all {num_counted} failed or broke a limit"


def slow_client(client: ClientFacts, rules: Rules) -> str:
    """Why the client, and not the server, set the figures; empty = it did not."""
    loop = client.loop_lag_ms.p99
    if loop is None or loop.value <= rules.max_lag_ms:
        return ""
    return f"the client was too slow: its event loop was {loop.value:.0f} ms late (p99)"


def warnings_of(
    outcomes: Sequence[Outcome],
    counted: Sequence[Outcome],
    client: ClientFacts,
    server: ServerFacts | None,
) -> list[str]:
    """`server` only where all that was asked of it is among the outcomes."""
    whole = [one for one in counted if not one.fault]
    found = [
        *_about_counts(whole),
        *_about_streams(whole),
        *_about_others(outcomes, server),
    ]
    if 0 < len(whole) < FEW_REQUESTS:
        found.append(f"{len(whole)} answers are few: their p99 is the slowest of them")
    if client.cpu_share > MOST_CPU:
        found.append(f"the client took {client.cpu_share:.0%} of a core, and may be the limit")
    return found


def sessions_began(load_per_s: float | None, traffic: Traffic) -> list[str]:
    """Of an open loop of sessions, where most of them had not begun, or had ended."""
    is_open = traffic.arrivals is not None and not traffic.concurrency and not traffic.trace
    if not is_open or traffic.profile.turns < 2 or load_per_s is None:
        return []
    assert traffic.arrivals is not None
    asked_per_s = min(rate for _, rate in traffic.arrivals.rates)
    if load_per_s >= MUCH_LESS * asked_per_s:
        return []
    fill_s = (traffic.profile.turns - 1) * traffic.profile.pause_s
    return [
        f"{load_per_s:.2f} requests/s came and {asked_per_s:g} were asked for: until sessions have "
        f"begun, and when they end, there are fewer; --warm-up-s {fill_s:.0f} and a --duration-s "
        "of several times that measure what is between"
    ]


def _about_counts(whole: Sequence[Outcome]) -> list[str]:
    found = []
    if num_untold := sum(one.num_usage_tokens is None for one in whole):
        found.append(f"{num_untold} answers came without usage: a token was counted for each event")
    told = [one for one in whole if one.num_prompt_tokens is not None]
    asked = sum(one.asked_prompt_tokens for one in told)
    counted = sum(one.num_prompt_tokens or 0 for one in told)
    if abs(counted - asked) > OFF_BY * asked + TEMPLATE_TOKENS * len(told):
        found.append(
            f"prompts have {counted / asked:.2f} times the tokens that the workload asks for; "
            "--tokenizer with the model's file makes them as long as asked"
        )
    short = sum(one.num_output_tokens < one.asked_output_tokens for one in whole)
    if short > OFF_BY * len(whole):
        found.append(
            f"{short} of {len(whole)} answers are shorter than asked: the server does not ignore "
            "the end of text (--extra-body), or ran out of context"
        )
    return found


def _about_streams(whole: Sequence[Outcome]) -> list[str]:
    found = []
    num_events = sum(one.num_events for one in whole)
    num_tokens = sum(one.num_output_tokens for one in whole)
    if num_events and num_tokens > (1 + OFF_BY) * num_events:
        found.append(
            f"an event carries {num_tokens / num_events:.1f} tokens on average: gaps are those "
            "between events"
        )
    long = [one for one in whole if one.num_output_tokens >= LONG_ANSWER]
    at_once = [one for one in long if one.token_times_ns[-1] - one.token_times_ns[0] < BUFFERED_NS]
    if long and len(at_once) > len(long) / 2:
        found.append(
            f"{len(at_once)} of {len(long)} answers came all at once: something between holds "
            "streams back, and TTFT and TPOT are not those of tokens"
        )
    return found


def _about_others(outcomes: Sequence[Outcome], server: ServerFacts | None) -> list[str]:
    """Somebody else's requests are in the server's figures, and in everybody's way."""
    if server is None or server.num_output_tokens is None:
        return []
    mine = sum(one.num_output_tokens for one in outcomes)
    others = server.num_output_tokens - mine
    # An answer that broke off may have had tokens that nobody read.
    unread = sum(one.asked_output_tokens for one in outcomes if one.fault)
    if others > OFF_BY * mine + unread:
        return [f"the server made {others} tokens for others meanwhile"]
    return []
