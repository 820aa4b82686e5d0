"""Who a step's time belongs to, by the cost model's word.

A step that contains a sequence would have taken less with that sequence alone: its own part is the
predicted cost of its share alone over the predicted cost of the whole step. The rest belongs to
others, and goes to their prefill and their decode in proportion to their tokens, each at what the
step would save without it. Predictions only divide; what is divided is the time that passed.
"""

from headrace.core.base.plan import SeqStep
from headrace.core.base.types import Ns, SeqId, StepId
from headrace.core.cost.model import CostModel, StepShape


class Share:
    """One sequence's part in a step."""

    __slots__ = ("end", "fresh", "is_decode", "num_lost", "num_tokens", "shape", "starts_output")

    def __init__(self, seq: SeqStep, num_prompt: int, regain: int) -> None:
        """`regain`: tokens that had been computed before a preemption; below it is lost work."""
        start, self.num_tokens = seq.start, len(seq.tokens)
        self.end = start + self.num_tokens  # tokens computed after the step
        self.num_lost = min(regain - start, self.num_tokens) if regain > start else 0
        self.starts_output = start + self.num_lost >= num_prompt  # its work that is not lost
        self.is_decode = self.starts_output and not self.num_lost  # recomputing is like prefill
        self.shape = self.fresh = StepShape.of_share(seq)
        if 0 < self.num_lost < self.num_tokens:
            # As it would have been without the preemption.
            self.fresh = StepShape.of_share(seq, self.num_lost)


class RunningStep:
    """A step with its predicted costs."""

    def __init__(
        self,
        step_id: StepId,
        started_ns: Ns,
        shares: dict[SeqId, Share],
        whole: StepShape,
        cost: CostModel,
    ) -> None:
        """What of the step is in none of `shares` decodes."""
        self.step_id = step_id
        self.started_ns = started_ns
        self.shares = shares
        self._cost = cost
        prefill = StepShape(0, 0, 0, 0, 0)
        for share in shares.values():
            if not share.is_decode:
                prefill += share.shape
        decode = whole - prefill
        self.whole_ns = cost.step_ns(whole)
        self._num_prefill, self._num_decode = prefill.num_tokens, decode.num_tokens
        # What the step would save without its prefill, and without its decode.
        self._prefill_ns, self._decode_ns = prefill.num_tokens, decode.num_tokens
        if prefill.num_tokens and decode.num_tokens:
            self._prefill_ns = max(0, self.whole_ns - cost.step_ns(decode))
            self._decode_ns = max(0, self.whole_ns - cost.step_ns(prefill))

    def split(self, share: Share, elapsed_ns: int) -> tuple[int, int, int, int]:
        """The time of the step as seen by one of its sequences; the parts add up to it.

        Its own work, its own work that had been done before, others' prefill, others' decode.
        """
        if share.num_lost == share.num_tokens:
            return 0, elapsed_ns, 0, 0
        whole_ns = self.whole_ns
        alone_ns = min(self._cost.step_ns(share.shape), whole_ns)
        alone_part = own_part = elapsed_ns * alone_ns // whole_ns
        if share.num_lost:
            fresh_ns = min(self._cost.step_ns(share.fresh), alone_ns)
            own_part = elapsed_ns * fresh_ns // whole_ns
        num_prefill, num_decode = self._num_prefill, self._num_decode
        if share.is_decode:
            num_decode -= share.num_tokens
        else:
            num_prefill -= share.num_tokens
        prefill, decode = self._divide(elapsed_ns - alone_part, num_prefill, num_decode)
        return own_part, alone_part - own_part, prefill, decode

    def split_outside(self, elapsed_ns: int) -> tuple[int, int]:
        """(prefill, decode) time of the step as seen by a sequence that was left out of it."""
        return self._divide(elapsed_ns, self._num_prefill, self._num_decode)

    def prefill_part(self) -> float:
        """Of the time that is not its own, what a sequence that decodes in it owes to prompts."""
        return self._divide(1 << 30, self._num_prefill, self._num_decode - 1)[0] / (1 << 30)

    def _divide(self, elapsed_ns: int, num_prefill: int, num_decode: int) -> tuple[int, int]:
        """Among so many tokens of prefill and decode, at what one of each saves on average.

        Exactly, and so that both parts grow with the whole.
        """
        if not num_prefill:
            return 0, elapsed_ns
        if not num_decode:
            return elapsed_ns, 0
        # Cross-multiplied, to stay with integers.
        prefill = self._prefill_ns * num_prefill * self._num_decode
        decode = self._decode_ns * num_decode * self._num_prefill
        if prefill + decode == 0:
            prefill, decode = num_prefill, num_decode
        part = elapsed_ns * prefill // (prefill + decode)
        return part, elapsed_ns - part


class StepLedger:
    """All time in which steps ran, as (prefill, decode): what left-out sequences waited for."""

    def __init__(self) -> None:
        self._done = (0, 0)
        self._running: RunningStep | None = None

    def start(self, step: RunningStep) -> None:
        self._running = step

    def end(self, now: Ns) -> None:
        self._done = self.at(now)
        self._running = None

    def at(self, now: Ns) -> tuple[int, int]:
        """Up to `now`, the part of a running step included."""
        if self._running is None:
            return self._done
        prefill, decode = self._running.split_outside(now - self._running.started_ns)
        return self._done[0] + prefill, self._done[1] + decode
