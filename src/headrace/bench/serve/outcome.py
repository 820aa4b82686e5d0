"""What became of one request, as its client saw it; which results cannot be.

Decides what a latency is counted from and which answers are believed; refuses to know how requests
were sent. Times are nanoseconds since the run began.
"""

from typing import TYPE_CHECKING

import msgspec

from headrace.core.base.metrics import e2e_ns, itl_ns, tpot_ns, ttft_ns
from headrace.core.base.request import FinishReason
from headrace.core.base.types import NS_PER_MS, Ns

if TYPE_CHECKING:
    from array import array

IMPOSSIBLE = "impossible"
_CLOCK_SLACK_NS = 2 * NS_PER_MS  # a timer may fire this much early


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `fault` is empty where the answer is whole; None = the server did not say."""

    request_id: str
    due_ns: Ns  # when the workload wanted it sent
    sent_ns: Ns
    ended_ns: Ns
    token_times_ns: "array[int]"  # of events with tokens; one may carry several
    fault: str = ""
    detail: str = ""  # of the fault, for people
    asked_prompt_tokens: int
    asked_output_tokens: int
    num_prompt_tokens: int | None = None
    num_usage_tokens: int | None = None  # output tokens by the server's count
    num_cached_tokens: int | None = None

    @property
    def num_events(self) -> int:
        return len(self.token_times_ns)

    @property
    def num_output_tokens(self) -> int:
        """By the server's count, or else one for each event."""
        return self.num_events if self.num_usage_tokens is None else self.num_usage_tokens

    @property
    def lag_ns(self) -> Ns:
        """How much later than it was due the client sent it."""
        return Ns(self.sent_ns - self.due_ns)

    def checked(self) -> "Outcome":
        """The same, failed where it says what cannot be."""
        if self.fault or not (reason := contradiction(self)):
            return self
        return msgspec.structs.replace(self, fault=IMPOSSIBLE, detail=reason)


def contradiction(one: Outcome) -> str:
    """What about an answer cannot be true; empty = nothing."""
    times = one.token_times_ns
    if one.lag_ns < -_CLOCK_SLACK_NS:
        return "it was sent before it was due"
    if times and times[0] < one.sent_ns:
        return "its TTFT is below zero"
    if times and times[-1] > one.ended_ns:
        return "it had a token after its end"
    if any(gap < 0 for gap in itl_ns(map(Ns, times))):
        return "its tokens are out of order"
    if one.num_output_tokens > one.asked_output_tokens:
        return f"{one.num_output_tokens} tokens where {one.asked_output_tokens} were asked for"
    # What was held back for the sake of a stop string may come as one more event.
    if one.num_events > one.num_output_tokens + 1:
        return f"{one.num_events} events with {one.num_output_tokens} tokens by the server's count"
    if one.num_output_tokens and not times:
        return f"{one.num_output_tokens} tokens by the server's count, and no event"
    if (one.num_cached_tokens or 0) > (one.num_prompt_tokens or one.num_cached_tokens or 0):
        return f"{one.num_cached_tokens} cached tokens of a prompt of {one.num_prompt_tokens}"
    return ""


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """What a request is judged by (core/base/metrics.py), counted from one moment on."""

    reason: FinishReason
    num_output_tokens: int
    ttft_ns: Ns | None
    max_itl_ns: Ns | None
    tpot_ns: float | None
    e2e_ns: Ns

    @classmethod
    def since(cls, begin_ns: Ns, one: Outcome) -> "Latencies":
        """Gaps lie between events, since nothing tells when a token within one was made."""
        times = one.token_times_ns
        ttft = ttft_ns(begin_ns, Ns(times[0])) if times else None
        end_ns = Ns(times[-1]) if times and not one.fault else one.ended_ns
        e2e = e2e_ns(begin_ns, end_ns)
        return cls(
            reason=FinishReason.ERROR if one.fault else FinishReason.STOP,
            num_output_tokens=one.num_output_tokens,
            ttft_ns=ttft,
            max_itl_ns=max(itl_ns(map(Ns, times)), default=None),
            tpot_ns=None if ttft is None else tpot_ns(e2e, ttft, one.num_output_tokens),
            e2e_ns=e2e,
        )
