"""Scheduling policies: pure functions of what the scheduler shows them."""

from collections.abc import Callable, Container, Iterable

from headrace.core.base.request import AGING_NS
from headrace.core.base.types import NS_PER_MS, Ns, SeqId
from headrace.core.config.schema import SchedulerConfig
from headrace.core.kv.manager import KvManager
from headrace.core.scheduler.sequence import Sequence

# ---- order: which waiting sequence is looked at first (smallest key first)

OrderKey = Callable[[Sequence, Ns, KvManager], tuple[float, int]]


def fcfs(seq: Sequence, now: Ns, kv: KvManager) -> tuple[float, int]:
    return 0, seq.order


def priority(seq: Sequence, now: Ns, kv: KvManager) -> tuple[float, int]:
    """Lower first, where waiting makes up for a worse one. What any two have waited grows alike, so
    that it is the arrival that counts.
    """
    return seq.spec.priority * AGING_NS + seq.spec.arrived_ns, seq.order


def longest_prefix(seq: Sequence, now: Ns, kv: KvManager) -> tuple[float, int]:
    """Longest cached prefix first (SGLang's lpm): blocks are used before they are evicted."""
    return -kv.match(seq.chain, seq.reusable_tokens), seq.order


def slo_slack(seq: Sequence, now: Ns, kv: KvManager) -> tuple[float, int]:
    """Least time left to the TTFT limit first; a limit already missed has lost its urgency."""
    limit_ms = seq.spec.slo.ttft_ms
    if limit_ms is None or seq.num_output:
        return float("inf"), seq.order
    slack_ns = seq.spec.arrived_ns + limit_ms * NS_PER_MS - now
    return (slack_ns if slack_ns > 0 else float("inf")), seq.order


ORDERS: dict[str, OrderKey] = {
    "fcfs": fcfs,
    "priority": priority,
    "longest_prefix": longest_prefix,
    "slo_slack": slo_slack,
}
# Keys that stay as they are while a sequence waits; the others are evaluated anew for each step.
STATIC_ORDERS = frozenset({"fcfs", "priority"})


# ---- admission: the length up to which a new sequence must find room


def is_protected(config: SchedulerConfig, seq: Sequence) -> bool:
    """Promised all it may need, and never a victim: preempted as often as allowed, or by policy."""
    return config.admission == "no_evict" or seq.num_times_victim >= config.max_preemptions


def promised_tokens(config: SchedulerConfig, seq: Sequence) -> int:
    """`no_evict` promises max_tokens, `predicted` a part of it, `optimistic` what is known."""
    known = len(seq.tokens)
    if is_protected(config, seq):
        return seq.max_len
    if config.admission == "predicted":
        predicted = seq.num_prompt + config.predicted_output_tokens
        return min(seq.max_len, max(known, predicted))
    return known


# ---- victim: who gives up its blocks when a running sequence cannot grow


def choose_victim(candidates: Iterable[Sequence], last_victim: int | None) -> Sequence | None:
    """The lowest priority, then the least lost work; not the last victim again if avoidable."""

    def key(seq: Sequence) -> tuple[bool, int, int, int]:
        return seq.seq_id == last_victim, -seq.spec.priority, seq.num_computed, -seq.order

    return min(candidates, key=key, default=None)


def victim_for(
    config: SchedulerConfig,
    seq: Sequence,
    running: Iterable[Sequence],
    placed: Container[SeqId],
    last_victim: SeqId | None,
) -> Sequence | None:
    """Of those that run: its like where the step has not placed them, and those of lower priority
    in any case.
    """
    candidates = (
        other
        for other in running
        if other is not seq
        and not is_protected(config, other)
        and (other.spec.priority, other.seq_id not in placed) > (seq.spec.priority, False)
    )
    return choose_victim(candidates, last_victim)
