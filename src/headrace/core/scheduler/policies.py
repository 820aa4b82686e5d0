"""Scheduling policies: pure functions of what the scheduler shows them."""

from collections.abc import Callable, Iterable
from typing import Final

from headrace.core.base.request import AGING_NS
from headrace.core.base.types import NS_PER_MS, Ns
from headrace.core.config.schema import SchedulerConfig
from headrace.core.cost.learned import LearnedCost
from headrace.core.cost.model import StepShape
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


# ---- budget: how many tokens the next step may compute

# Prompt tokens of a step whose time nobody can predict yet: on the slowest machines less than half
# a second, on the fastest a few steps more than needed, once.
UNKNOWN_STEP_TOKENS: Final = 128


def step_budget(
    config: SchedulerConfig,
    cost: LearnedCost,
    decoding: Iterable[Sequence],
    prompts: Iterable[Sequence],
) -> int:
    """`fixed`, or `itl`: the most tokens whose predicted step time keeps the tightest ITL target
    among those that decode, less a margin.

    `decoding` need one token each, and get it in any case; the rest is prefill, which is taken to
    begin where the farthest of `prompts` is. Prefill never stops: it gets `min_prefill_tokens` at
    least; and where decoding alone takes longer than the target, as much time as that takes. While
    nobody decodes, long prompts are cut so that whoever arrives during a step need not wait for
    `step_tokens` of them. A step never has more tokens than these. While the cost model is a guess,
    prefill gets UNKNOWN_STEP_TOKENS.
    """
    if config.budget == "fixed":
        return config.step_tokens
    seqs = [seq for seq in decoding if seq.length > seq.num_prompt]
    if not cost.is_reliable:
        return min(len(seqs) + UNKNOWN_STEP_TOKENS, config.step_tokens)
    start = 0
    limit_ns = 0.0
    for seq in prompts:
        start = max(start, seq.num_planned)
        if seq.is_long:
            limit_ns = config.long_step_ms * NS_PER_MS
    if not (seqs or limit_ns):
        return config.step_tokens
    num_decode, num_kv = len(seqs), sum([len(seq.tokens) for seq in seqs])
    predict_ns = cost.current.step_ns
    if seqs:
        limit_ns = _itl_target_ms(config, seqs) * (1.0 - config.itl_margin) * NS_PER_MS
        decode_ns = predict_ns(StepShape(num_decode, num_decode, num_decode, num_kv, num_kv))
        if decode_ns >= limit_ns:
            limit_ns = 2 * decode_ns

    def predicted_ns(num_tokens: int) -> Ns:
        num_prefill = num_tokens - num_decode
        pairs = num_kv + num_prefill * start + num_prefill * (num_prefill + 1) // 2
        kv = num_kv + start + num_prefill
        return predict_ns(StepShape(num_tokens, num_decode + 1, num_decode + 1, pairs, kv))

    low, high = num_decode, config.step_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if predicted_ns(middle) <= limit_ns:
            low = middle
        else:
            high = middle - 1
    return min(max(low, num_decode + config.min_prefill_tokens), config.step_tokens)


def _itl_target_ms(config: SchedulerConfig, seqs: Iterable[Sequence]) -> float:
    """The tightest; that of the configuration where a request states none."""
    stated = (seq.spec.slo.itl_ms for seq in seqs)
    return min(config.itl_target_ms if one is None else one for one in stated)


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
