"""Who a step's time belongs to, by the cost model's word.

A step that contains a sequence would have taken less with that sequence alone: its own part is the
predicted cost of its share alone over the predicted cost of the whole step. The rest belongs to
others, and goes to their prefill and their decode in proportion to what the step would save without
the one or the other. Predictions only divide; what is divided is the time that passed.
"""

from collections.abc import Iterable

from headrace.core.base.plan import SeqStep
from headrace.core.base.types import Ns, SeqId, StepId
from headrace.core.cost.model import CostModel, StepShape

_NOTHING = StepShape(0, 0, 0, 0, 0)


class Share:
    """One sequence's part in a step."""

    __slots__ = ("end", "fresh", "is_decode", "num_lost", "num_tokens", "shape", "starts_output")

    def __init__(self, seq: SeqStep, num_prompt: int, regain: int) -> None:
        """`regain`: tokens that had been computed before a preemption; below it is lost work."""
        self.num_tokens = len(seq.tokens)
        self.end = seq.start + self.num_tokens  # tokens computed after the step
        self.num_lost = min(max(regain - seq.start, 0), self.num_tokens)
        self.starts_output = seq.start + self.num_lost >= num_prompt  # its work that is not lost
        self.is_decode = self.starts_output and not self.num_lost  # recomputing is like prefill
        self.shape = StepShape.of_share(seq)
        # The share as it would have been without the preemption.
        self.fresh = self.shape
        if 0 < self.num_lost < self.num_tokens:
            self.fresh = StepShape.of_share(seq, self.num_lost)


class Split:
    """A duration, divided: the parts add up to it."""

    __slots__ = ("lost_ns", "others_decode_ns", "others_prefill_ns", "own_ns")

    def __init__(self, own_ns: int, lost_ns: int, others_prefill_ns: int, others_decode_ns: int):
        self.own_ns = own_ns  # its own work
        self.lost_ns = lost_ns  # its own work that had been done before
        self.others_prefill_ns = others_prefill_ns
        self.others_decode_ns = others_decode_ns


class RunningStep:
    """A step with its predicted costs."""

    def __init__(
        self, step_id: StepId, started_ns: Ns, shares: dict[SeqId, Share], cost: CostModel
    ) -> None:
        self.step_id = step_id
        self.started_ns = started_ns
        self.shares = shares
        self._cost = cost
        self._prefill = _sum(share.shape for share in shares.values() if not share.is_decode)
        self._decode = _sum(share.shape for share in shares.values() if share.is_decode)
        self._whole = self._prefill + self._decode
        self._whole_ns = cost.step_ns(self._whole)
        self._weights = self._savings(self._prefill, self._decode)

    def split(self, share: Share, elapsed_ns: int) -> Split:
        """The time of the step as seen by one of its sequences."""
        if share.num_lost == share.num_tokens:
            return Split(0, elapsed_ns, 0, 0)
        alone_ns = min(self._cost.step_ns(share.shape), self._whole_ns)
        together_ns = elapsed_ns * alone_ns // self._whole_ns
        own_ns = together_ns
        if share.num_lost:
            fresh_ns = min(self._cost.step_ns(share.fresh), alone_ns)
            own_ns = elapsed_ns * fresh_ns // self._whole_ns
        prefill, decode = self._prefill, self._decode
        if share.is_decode:
            decode -= share.shape
        else:
            prefill -= share.shape
        parts = _divide(elapsed_ns - together_ns, self._savings(prefill, decode))
        return Split(own_ns, together_ns - own_ns, *parts)

    def split_outside(self, elapsed_ns: int) -> tuple[int, int]:
        """(prefill, decode) time of the step as seen by a sequence that was left out of it."""
        return _divide(elapsed_ns, self._weights)

    def _savings(self, prefill: StepShape, decode: StepShape) -> tuple[int, int]:
        """What the step would save without this prefill, and without this decode."""
        if not decode.num_tokens:
            return 1, 0
        if not prefill.num_tokens:
            return 0, 1
        return (
            max(0, self._whole_ns - self._predict(self._whole - prefill)),
            max(0, self._whole_ns - self._predict(self._whole - decode)),
        )

    def _predict(self, shape: StepShape) -> int:
        return self._cost.step_ns(shape) if shape.num_tokens else 0


def _divide(elapsed_ns: int, weights: tuple[int, int]) -> tuple[int, int]:
    """Exactly, and so that both parts grow with the whole."""
    prefill, decode = weights
    if prefill + decode == 0:
        prefill = decode = 1
    part = elapsed_ns * prefill // (prefill + decode)
    return part, elapsed_ns - part


def _sum(shapes: Iterable[StepShape]) -> StepShape:
    return sum(shapes, _NOTHING)


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
