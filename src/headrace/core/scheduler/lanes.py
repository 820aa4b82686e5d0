"""How prompts share a step: two lanes by length, and turns among the long ones.

A short prompt must not wait until a long one beside it is computed, and a long one must not wait
for as long as short ones come. So each lane is guaranteed a share of a step's prompt tokens, and
what one lane leaves is the other's.

Short prompts run in the order of their queue: sharing among equals would only make all of them
late. Long ones take turns of a quantum (deficit round robin, Shreedhar and Varghese 1995), since
their lengths differ most. Refuses to know sequences: it deals in ids and counts of tokens.
"""

from collections import deque
from collections.abc import Mapping
from typing import Final

from headrace.core.base.types import SeqId

QUANTUM_TOKENS: Final = 128

# Steps of long prompts with nobody beside them, after which no short prompt is expected: some ten
# seconds.
QUIET_STEPS: Final = 100


class ShortShare:
    """The short lane's share of what prompts get while both lanes have work, and what steps leave
    over to the next one, so that both lanes advance however little a step has. Knows whether short
    prompts come now and then.
    """

    def __init__(self, share: float) -> None:
        """`share` in 0..1."""
        self.share = share
        self.owed_ns = 0.0  # time that the long lane was due, and that no piece of it fitted into
        self._carry = 0.0
        self._num_alone = QUIET_STEPS

    @property
    def is_expecting(self) -> bool:
        """Whether a short prompt is likely to come before the long ones are done."""
        return self._num_alone < QUIET_STEPS

    def saw(self, num_short: int, *, is_alone: bool) -> None:
        """A step of long prompts has so many tokens of short ones; `is_alone`: nobody decodes."""
        if num_short:
            self._num_alone = 0
        elif is_alone:
            self._num_alone += 1

    def part_of(self, num_tokens: int) -> int:
        """The short lane's part of so many."""
        self._carry += num_tokens * self.share
        num_short = min(int(self._carry), num_tokens)
        self._carry -= num_short
        return num_short


class DeficitRoundRobin:
    """Turns among members. Of two that always want more, neither gets over two quanta ahead of the
    other.
    """

    def __init__(self, quantum: int = QUANTUM_TOKENS) -> None:
        self._quantum = quantum
        self._ring: deque[SeqId] = deque()  # the first one has its turn
        self._deficits: dict[SeqId, int] = {}

    def __len__(self) -> int:
        return len(self._ring)

    def join(self, seq_id: SeqId) -> None:
        self._ring.append(seq_id)
        self._deficits[seq_id] = 0

    def leave(self, seq_id: SeqId) -> None:
        """Idempotent."""
        if self._deficits.pop(seq_id, None) is not None:
            self._ring.remove(seq_id)

    def allot(self, wants: Mapping[SeqId, int], budget: int) -> dict[SeqId, int]:
        """Tokens for each member that gets any. A turn that the budget cuts goes on next time."""
        if len(self._ring) == 1:
            return self._allot_alone(self._ring[0], wants, budget)
        given: dict[SeqId, int] = {}
        num_content = 0
        while budget > 0 and num_content < len(self._ring):
            seq_id = self._ring[0]
            want = wants.get(seq_id, 0) - given.get(seq_id, 0)
            if want > 0:
                num_content = 0
                deficit = self._deficits[seq_id] or self._quantum
                num_tokens = min(want, deficit, budget)
                given[seq_id] = given.get(seq_id, 0) + num_tokens
                budget -= num_tokens
                self._deficits[seq_id] = deficit - num_tokens
                if num_tokens < deficit and num_tokens < want:
                    break
            else:
                num_content += 1
            self._ring.rotate(-1)
        return given

    def _allot_alone(
        self, seq_id: SeqId, wants: Mapping[SeqId, int], budget: int
    ) -> dict[SeqId, int]:
        """What turn after turn of a single member comes to."""
        num_tokens = min(wants.get(seq_id, 0), budget)
        if num_tokens <= 0:
            return {}
        left = (self._deficits[seq_id] or self._quantum) - num_tokens
        self._deficits[seq_id] = left if left > 0 else left % self._quantum
        return {seq_id: num_tokens}
