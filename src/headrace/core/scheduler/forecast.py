"""How much prefill is due, and how long until a sequence that arrives now has its first token."""

from collections.abc import Collection, Iterable
from typing import Final

from headrace.core.base.types import Ns
from headrace.core.config.schema import SchedulerConfig
from headrace.core.cost.learned import LearnedCost
from headrace.core.cost.model import StepShape
from headrace.core.kv.manager import KvManager
from headrace.core.scheduler.lanes import ShortShare
from headrace.core.scheduler.room import Company, room_of
from headrace.core.scheduler.sequence import Sequence

# Looking up what the cache holds takes time; of a longer queue the rest counts in full.
MAX_LOOKUPS: Final = 256


def count_prefill(kv: KvManager, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> int:
    """Known tokens yet to be computed, beside what the cache holds and the next token of each
    sequence that decodes.
    """
    total = sum(seq.num_remaining for seq in running if seq.num_remaining > 1)
    for index, seq in enumerate(waiting):
        total += len(seq.tokens)
        if index < MAX_LOOKUPS:
            total -= kv.match(seq.chain, seq.reusable_tokens) * kv.block_size
    return total


def predict_ttft_ns(
    config: SchedulerConfig,
    cost: LearnedCost,
    kv: KvManager,
    seq: Sequence,
    waiting: Iterable[Sequence],
    running: Collection[Sequence],
) -> Ns:
    """Predicted time until `seq` has its first token.

    All prefill that is due before it, and its own, runs in steps as full as the budget allows,
    beside the sequences that decode; those that wait are taken to find no more in the cache than
    they find now. Long prompts delay a short one by no more than their lane's share.
    """
    own = len(seq.tokens) - kv.match(seq.chain, seq.reusable_tokens) * kv.block_size
    due = own
    num_long = 0
    others = [len(other.tokens) for other in waiting]
    others += [other.num_remaining for other in running if other.num_remaining > 1]
    for num_tokens in others:
        if num_tokens > config.short_prompt_tokens >= own:
            num_long += num_tokens
        else:
            due += num_tokens
    share = config.short_prompt_share
    due += min(num_long, round(due * (1.0 - share) / share))
    decoding = [other for other in running if other.num_remaining == 1]
    company = Company.of(decoding, config.itl_target_ms)
    room = room_of(config, cost, company, (), ShortShare(share)).short(has_long=False)
    num_decode = len(decoding)
    num_kv = sum(len(other.tokens) for other in running)
    total = 0
    while due > 0:
        num_tokens = min(due, max(1, room))
        full_steps = max(1, due // num_tokens)
        pairs = num_kv + num_tokens * len(seq.tokens) // 2
        shape = StepShape(
            num_tokens + num_decode, num_decode + 1, num_decode + 1, pairs, num_kv + num_tokens
        )
        total += full_steps * cost.step_ns(shape)
        due -= full_steps * num_tokens
    return Ns(total)
