"""Scheduling policies: pure functions of what the scheduler shows them."""

from collections.abc import Callable, Iterable

from headrace.core.base.types import NS_PER_MS, Ns
from headrace.core.config.schema import SchedulerConfig
from headrace.core.cost.model import CostModel, StepShape
from headrace.core.kv.manager import KvManager
from headrace.core.scheduler.sequence import Sequence

# ---- order: which waiting sequence is looked at first (smallest key first)

OrderKey = Callable[[Sequence, Ns, KvManager], tuple[float, int]]


def fcfs(seq: Sequence, now: Ns, kv: KvManager) -> tuple[float, int]:
    return 0, seq.order


def priority(seq: Sequence, now: Ns, kv: KvManager) -> tuple[float, int]:
    return seq.spec.priority, seq.order


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


# ---- budget: how many tokens the next step may compute


def step_budget(config: SchedulerConfig, cost: CostModel, running: Iterable[Sequence]) -> int:
    """Fixed, or the largest count whose predicted step time keeps the tightest ITL target among
    those that decode.

    Each of the sequences that decode gets its token in any case; the rest of the budget is prefill.
    """
    if config.budget == "fixed":
        return config.step_tokens
    decoding = [seq for seq in running if seq.num_remaining == 1 and seq.num_output]
    if not decoding:
        return config.step_tokens
    target_ms = min(
        config.itl_target_ms if seq.spec.slo.itl_ms is None else seq.spec.slo.itl_ms
        for seq in decoding
    )
    target_ns = target_ms * NS_PER_MS
    num_decode, num_kv = len(decoding), sum(len(seq.tokens) for seq in decoding)

    def predicted_ns(num_tokens: int) -> Ns:
        num_prefill = num_tokens - num_decode
        pairs = num_kv + num_prefill * (num_prefill + 1) // 2
        return cost.step_ns(
            StepShape(num_tokens, num_decode + 1, num_decode + 1, pairs, num_kv + num_prefill)
        )

    low, high = num_decode, config.step_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if predicted_ns(middle) <= target_ns:
            low = middle
        else:
            high = middle - 1
    # One token of prefill at least, or a target that cannot be met would starve every prompt; but
    # no step is larger than the executor was built for.
    return min(max(low, num_decode + 1), config.step_tokens)


# ---- admission: the length up to which a new sequence must find room


def is_protected(config: SchedulerConfig, seq: Sequence) -> bool:
    """Preempted as often as allowed: promised all it may need, never a victim again."""
    return seq.num_times_victim >= config.max_preemptions


def promised_tokens(config: SchedulerConfig, seq: Sequence) -> int:
    """`no_evict` promises max_tokens, `predicted` a part of it, `optimistic` what is known."""
    known = len(seq.tokens)
    if is_protected(config, seq):
        return seq.max_len
    match config.admission:
        case "no_evict":
            return seq.max_len
        case "predicted":
            predicted = seq.num_prompt + config.predicted_output_tokens
            return min(seq.max_len, max(known, predicted))
        case _:
            return known


# ---- victim: who gives up its blocks when a running sequence cannot grow


def choose_victim(candidates: Iterable[Sequence], last_victim: int | None) -> Sequence | None:
    """The lowest priority, then the least lost work; not the last victim again if avoidable."""

    def key(seq: Sequence) -> tuple[bool, int, int, int]:
        return seq.seq_id == last_victim, -seq.spec.priority, seq.num_computed, -seq.order

    return min(candidates, key=key, default=None)
