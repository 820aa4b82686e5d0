"""Budget policies: how many tokens prompts may have of the next step, and which lane how many.

`fixed` counts tokens; `itl` keeps the predicted time of the step below the tightest ITL target of
those that decode. Both are asked in the order in which a step is filled: the short lane for its
guaranteed part, then the long one beside what the short one took, then the short one for the rest.
"""

import math
from collections.abc import Callable, Iterable
from itertools import count
from typing import Final, NamedTuple, Protocol

from headrace.core.base.types import NS_PER_MS, Ns
from headrace.core.config.schema import SchedulerConfig
from headrace.core.cost.fitted import formula_of
from headrace.core.cost.learned import LearnedCost
from headrace.core.cost.model import StepShape
from headrace.core.scheduler.lanes import ShortShare
from headrace.core.scheduler.sequence import Sequence

# Prompt tokens of a step whose time nobody can predict yet: on the slowest machines less than half
# a second, on the fastest a few steps more than needed, once.
UNKNOWN_STEP_TOKENS: Final = 128

# Of `long_step_ms`, while short prompts are expected. Whoever comes waits for half of a step.
EXPECTING_STEP: Final = 0.4


class Room(Protocol):
    """What a step has for prompts, in tokens."""

    def short(self, *, has_long: bool) -> int:
        """Guaranteed to the short lane."""
        ...

    def long(self, num_short: int, *, is_empty: bool) -> int:
        """For the long lane, beside so many tokens of short prompts. `is_empty`: nothing else is in
        the step, not even who decodes.
        """
        ...

    def rest(self, num_short: int, num_long: int) -> int:
        """More for the short lane, when both have taken so many."""
        ...


class Company(NamedTuple):
    """Those that decode in a step, which get their token in any case."""

    num_seqs: int
    num_kv_tokens: int  # that they have
    itl_ms: float | None  # the tightest target that one of them states, or is given

    @classmethod
    def of(cls, decoding: Iterable[Sequence], usual_itl_ms: float) -> "Company":
        """Who states no target has the usual one."""
        seqs = [seq for seq in decoding if seq.length > seq.num_prompt]
        if not seqs:
            return cls(0, 0, None)
        stated = [seq.spec.slo.itl_ms for seq in seqs]
        targets = [usual_itl_ms if one is None else one for one in stated]
        return cls(len(seqs), sum([len(seq.tokens) for seq in seqs]), min(targets))


def room_of(
    config: SchedulerConfig,
    cost: LearnedCost,
    company: Company,
    prompts: Iterable[Sequence],
    share: ShortShare,
) -> Room:
    """The room beside those that decode.

    While the cost model is a guess, prompts get UNKNOWN_STEP_TOKENS. A step never has more than
    `step_tokens`.
    """
    most = max(0, config.step_tokens - company.num_seqs)
    if config.budget == "fixed":
        return TokenRoom(most, share)
    if not cost.is_reliable:
        return TokenRoom(min(most, UNKNOWN_STEP_TOKENS), share)
    return TimeRoom(config, cost, company, prompts, most, share)


class TokenRoom:
    """So many tokens, whatever they cost."""

    def __init__(self, num_tokens: int, share: ShortShare) -> None:
        self._num_tokens = num_tokens
        self._share = share

    def short(self, *, has_long: bool) -> int:
        return self._share.part_of(self._num_tokens) if has_long else self._num_tokens

    def long(self, num_short: int, *, is_empty: bool) -> int:
        return self._num_tokens - num_short

    def rest(self, num_short: int, num_long: int) -> int:
        return self._num_tokens - num_short - num_long


class TimeRoom:
    """As many tokens as the predicted time of the step allows.

    The limit is the tightest ITL target of those that decode, less a margin; where decoding alone
    takes longer, prompts have as much time as that takes. While nobody decodes, long prompts are
    cut so that whoever arrives during a step need not wait for `step_tokens` of them; the shorter
    where short ones come now and then.

    Prompts never stop: short ones get `min_prefill_tokens` at least. A token of a long prompt costs
    the more the farther it is, in the end more than a whole step has. So a long prompt has its
    share of the *time*, and what does not suffice for a piece of it stays owed.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cost: LearnedCost,
        company: Company,
        prompts: Iterable[Sequence],
        most: int,
        share: ShortShare,
    ) -> None:
        """`most`: tokens of prompts that fit into the step whatever they cost."""
        self._cost = cost.current
        self._formula = formula_of(self._cost)
        self._most, self._least = most, min(most, config.min_prefill_tokens)
        self._share = share
        self._num_decode, self._num_kv, target_ms = company
        self._short_start = self._long_start = 0
        for seq in prompts:
            if seq.is_long:
                self._long_start = max(self._long_start, seq.num_planned)
            else:
                self._short_start = max(self._short_start, seq.num_planned)
        self._decode_ns = self._step_ns(0, 0) if company.num_seqs else 0
        self._limit_ns = config.long_step_ms * NS_PER_MS
        if share.is_expecting:
            self._limit_ns *= EXPECTING_STEP
        if target_ms is not None:
            self._limit_ns = target_ms * (1.0 - config.itl_margin) * NS_PER_MS
            if self._decode_ns >= self._limit_ns:
                self._limit_ns = 2.0 * self._decode_ns

    def short(self, *, has_long: bool) -> int:
        if not has_long:
            return self.rest(0, 0)
        share = self._share.share
        limit_ns = self._decode_ns + share * (self._limit_ns - self._decode_ns)
        num_tokens = max(self._most_short(limit_ns, 0), math.ceil(share * self._least))
        return min(num_tokens, self._share.part_of(self._most))

    def long(self, num_short: int, *, is_empty: bool) -> int:
        self._share.saw(num_short, is_alone=not self._num_decode)
        alone_ns = self._step_ns(num_short, 0) if self._num_decode or num_short else 0
        guaranteed_ns = (1.0 - self._share.share) * (self._limit_ns - self._decode_ns)
        self._share.owed_ns += max(self._limit_ns - alone_ns, guaranteed_ns)
        num_long = self._most_long(alone_ns + self._share.owed_ns, num_short)
        least = self._least_long(num_short)
        if num_long < least and not is_empty:
            return 0
        self._share.owed_ns = 0.0
        return min(max(num_long, least), self._most - num_short)

    def rest(self, num_short: int, num_long: int) -> int:
        if not (self._num_decode or num_long):
            return self._most - num_short
        num_tokens = self._most_short(self._limit_ns, num_long)
        return max(0, num_tokens - num_short, self._least - num_short - num_long)

    def _most_short(self, limit_ns: float, num_long: int) -> int:
        return most_within(
            limit_ns, self._most - num_long, lambda num: self._step_ns(num, num_long)
        )

    def _most_long(self, limit_ns: float, num_short: int) -> int:
        most = self._most - num_short
        return most_within(limit_ns, most, lambda num: self._step_ns(num_short, num))

    def _least_long(self, num_short: int) -> int:
        """The least piece of a long prompt that is worth its time: where it has to read all that is
        before it, as many tokens as cost the same again, up to `min_prefill_tokens`.
        """
        alone_ns = self._step_ns(num_short, 0)
        first_ns = self._step_ns(num_short, 1) - alone_ns
        more_ns = self._step_ns(num_short, self._least) - alone_ns - first_ns
        if more_ns * self._least <= first_ns * (self._least - 1):
            return self._least
        return min(self._least, max(1, math.ceil(first_ns * (self._least - 1) / more_ns)))

    def _step_ns(self, num_short: int, num_long: int) -> Ns:
        """Predicted, with so many tokens of short and of long prompts beside those that decode."""
        num_seqs = self._num_decode + (num_short > 0) + (num_long > 0)
        pairs = kv = self._num_kv
        for start, num in ((self._short_start, num_short), (self._long_start, num_long)):
            if num:
                pairs += num * start + num * (num + 1) // 2
                kv += start + num
        num_tokens = self._num_decode + num_short + num_long
        if self._formula is not None:
            return self._formula.ns(num_tokens, num_seqs, num_seqs, pairs, kv)
        return self._cost.step_ns(StepShape(num_tokens, num_seqs, num_seqs, pairs, kv))


def most_within(limit: float, most: int, cost: Callable[[int], float]) -> int:
    """The largest number up to `most` that costs no more than the limit, 0 where not even 1 does. A
    larger number never costs less.

    Costs are nearly straight between two points, so it is looked for where a line crosses the
    limit; each third time in the middle, in case they are not.
    """
    if most < 1 or (low_cost := cost(1)) > limit:
        return 0
    if (high_cost := cost(most)) <= limit:
        return most
    low, high = 1, most
    for turn in count(1):
        if high - low <= 1:
            break
        part = (limit - low_cost) / (high_cost - low_cost) if turn % 3 else 0.5
        number = min(max(low + int(part * (high - low)), low + 1), high - 1)
        if (at := cost(number)) <= limit:
            low, low_cost = number, at
        else:
            high, high_cost = number, at
    return low
