"""Many decode steps told to a Telemetry at once: what a simulation that glides over them knows.

Every latency is what telling them one by one gives. How the time of steps without prompts divides
between a sequence's own tokens and those beside it is taken from the first and the last one of a
run of them; of a step with prompts it is as exact as ever.

It is the fold's own matter, so it knows what is inside.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from headrace.core.base.plan import SeqStep, StepPlan
from headrace.core.base.types import FOREVER_NS, Ns, SeqId, StepId
from headrace.core.cost.model import StepShape
from headrace.core.telemetry.fold import Telemetry
from headrace.core.telemetry.joined import ClusterTelemetry
from headrace.core.telemetry.life import Life
from headrace.core.telemetry.parts import DECODE, DECODE_INTERFERENCE, OTHERS_PREFILL
from headrace.core.telemetry.record import ITL_BOUNDS_NS
from headrace.core.telemetry.steps import RunningStep


def emit_run(
    telemetry: ClusterTelemetry, seq_id: SeqId, times_ns: Sequence[Ns], delay_ns: Ns
) -> None:
    """Readers got tokens of a sequence that has some, one by one, so long after these times."""
    life = telemetry._seen._lives.get(seq_id)
    if life is not None:
        assert life.last_token_ns is not None
        life.last_token_ns = Ns(life.last_token_ns - delay_ns)
        longest = _note_gaps(life, times_ns)
        if longest is not None:
            life._gap_spent = [0] * len(life._spent)
            life._gap_spent[DECODE] = longest[0]
        life.last_token_ns = Ns(times_ns[-1] + delay_ns)


class Sums(NamedTuple):
    """Over steps, with `x` being a step's time over what it was predicted to take."""

    own: float = 0.0  # of x
    own_at: float = 0.0  # of x times the step's number
    prefill: float = 0.0  # of the time that belongs to prompts, if nothing is one's own
    prefill_own: float = 0.0  # of that part of x
    prefill_own_at: float = 0.0


class Stretch:
    """Steps of those that decode in all of them, of which some may have prompts beside.

    A sequence that decodes would have taken alone what the cost model says of its length, which
    grows by one with each step: so its parts of any number of steps follow from a few sums.
    """

    def __init__(self, telemetry: Telemetry, started_ns: Ns) -> None:
        """The first step, which runs, only decodes."""
        self._telemetry = telemetry
        self._started_ns = started_ns
        self.step, self._at_ns = 0, started_ns  # up to where the sums are
        self._sums = Sums()
        self._since: dict[SeqId, tuple[int, Sums]] = {}
        self._mixed: dict[int, tuple[float, float]] = {}  # by step: 1 / predicted, prompts' part
        self._running: RunningStep | None = None  # a step with prompts
        telemetry._ahead.clear()
        telemetry._step = None
        self.only_decodes(StepId(-1), started_ns)

    def join(self, seq_id: SeqId) -> None:
        """It decodes from the next step on."""
        self._since[seq_id] = self.step, self._sums

    def decode(self, first: StepShape, last: StepShape, step: int, ends_ns: Sequence[Ns]) -> None:
        """Steps up to this one only decoded; all began with the same sequences."""
        if step <= self.step:
            return
        took_ns = ends_ns[step - 1] - self._at_ns
        cost = self._telemetry.cost
        one = took_ns / (2 * cost.step_ns(first))
        other = took_ns / (2 * cost.step_ns(last))
        sums = self._sums
        self._sums = sums._replace(
            own=sums.own + one + other,
            own_at=sums.own_at + one * (self.step + 1) + other * step,
        )
        self.step, self._at_ns = step, ends_ns[step - 1]

    def begin_mixed(
        self, step_id: StepId, at_ns: Ns, prompts: Sequence[SeqStep], whole: StepShape
    ) -> None:
        """A step with prompts starts, after all those that were told."""
        telemetry = self._telemetry
        shares = {share.seq_id: telemetry._share(share) for share in prompts}
        for share in prompts:
            life = telemetry._lives.get(share.seq_id)
            if life is not None:
                life.start_step(at_ns)
        telemetry._ledger.end(at_ns)
        self._running = RunningStep(step_id, at_ns, shares, whole, telemetry.cost)
        telemetry._run(self._running)

    def end_mixed(self, step: int, at_ns: Ns) -> None:
        """It has ended; what it was to its prompts the Telemetry hears by itself, next."""
        running = self._running
        assert running is not None
        took_ns = at_ns - self._at_ns
        ratio, part = took_ns / running.whole_ns, running.prefill_part()
        own, own_at, prefill, prefill_own, prefill_own_at = self._sums
        self._sums = Sums(
            own + ratio,
            own_at + ratio * step,
            prefill + took_ns * part,
            prefill_own + ratio * part,
            prefill_own_at + ratio * part * step,
        )
        self._mixed[step] = 1.0 / running.whole_ns, part
        self.step, self._at_ns = step, at_ns
        self._running = None

    def only_decodes(self, step_id: StepId, at_ns: Ns) -> None:
        """So does every step from here on. For who waits, nothing else counts of them."""
        telemetry = self._telemetry
        telemetry._ledger.end(at_ns)
        nothing = StepShape(1, 1, 1, 1, 1)
        telemetry._ledger.start(RunningStep(step_id, at_ns, {}, nothing, telemetry.cost))

    def leave(self, seq_id: SeqId, length: int, ends_ns: Sequence[Ns]) -> None:
        """It decodes no more, or is to be told as others are. `length` is what its length was
        beyond the number of steps; all steps so far were told.
        """
        begun, before = self._since.pop(seq_id)
        life = self._telemetry._lives.get(seq_id)
        if life is None or begun == self.step:
            return
        cost, first, last = self._telemetry.cost, length + begun, length + self.step - 1
        alone_ns = cost.step_ns(StepShape(1, 1, 1, first, first))
        slope = 0.0
        if last > first:
            slope = (cost.step_ns(StepShape(1, 1, 1, last, last)) - alone_ns) / (last - first)
        base = alone_ns - slope * (begun + 1)  # alone in step s: base + slope · s
        sums = [after - was for after, was in zip(self._sums, before, strict=True)]
        total_ns = self._at_ns - life.mark_ns
        own_ns = min(total_ns, round(base * sums[0] + slope * sums[1]))
        prefill_ns = round(sums[2] - base * sums[3] - slope * sums[4])
        prefill_ns = max(0, min(total_ns - own_ns, prefill_ns))
        life._spent[DECODE] += own_ns
        life._spent[OTHERS_PREFILL] += prefill_ns
        life._spent[DECODE_INTERFERENCE] += total_ns - own_ns - prefill_ns
        longest = _note_gaps(life, ends_ns[begun : self.step])
        if longest is not None:
            gap_ns, index = longest
            step = begun + 1 + index
            inverse, part = self._mixed.get(step, (own_ns / total_ns / max(1, alone_ns), 0.0))
            mine_ns = min(gap_ns, round(gap_ns * (base + slope * step) * inverse))
            theirs_ns = round((gap_ns - mine_ns) * part)
            life._gap_spent = spent = [0] * len(life._spent)
            spent[DECODE], spent[OTHERS_PREFILL] = mine_ns, theirs_ns
            spent[DECODE_INTERFERENCE] = gap_ns - mine_ns - theirs_ns
        life._token_spent = life._spent.copy()
        life._leave_step(self._at_ns)

    def end(self, started_ns: Ns, plans: Sequence[StepPlan]) -> None:
        """All have left. The first of `plans` has begun at that time, the others follow."""
        telemetry, plan = self._telemetry, plans[0]
        telemetry._ledger.end(started_ns)
        for share in plan.seqs:
            life = telemetry._lives.get(share.seq_id)
            if life is not None:
                life.is_in_step = True
        shares = {share.seq_id: telemetry._share(share) for share in plan.seqs}
        whole = StepShape.of(plan)
        telemetry._run(RunningStep(plan.step_id, started_ns, shares, whole, telemetry.cost))
        telemetry._ahead.extend(plans[1:])


def _note_gaps(life: Life, times_ns: Sequence[Ns]) -> tuple[Ns, int] | None:
    """The longest gap and its place, where none before was as long.

    Most gaps are in the same bucket as those before them, so nothing is looked for and nothing is
    made for each: compiled, a gap costs a few nanoseconds.
    """
    assert life.last_token_ns is not None
    last_ns: int = life.last_token_ns
    low_ns, high_ns, bucket, num_alike = 0, -1, 0, 0
    longest_ns, place = -1, 0
    counts, num_bounds = life._gaps, len(ITL_BOUNDS_NS)
    index = 0
    for at_ns in times_ns:
        gap_ns = at_ns - last_ns
        last_ns = at_ns
        if gap_ns > longest_ns:
            longest_ns, place = gap_ns, index
        index += 1
        if low_ns < gap_ns <= high_ns:
            num_alike += 1
            continue
        counts[bucket] += num_alike
        num_alike, bucket = 1, bisect_left(ITL_BOUNDS_NS, gap_ns)
        low_ns = ITL_BOUNDS_NS[bucket - 1] if bucket else -1
        high_ns = ITL_BOUNDS_NS[bucket] if bucket < num_bounds else FOREVER_NS
    counts[bucket] += num_alike
    life.last_token_ns = Ns(last_ns)
    if longest_ns <= life._max_gap_ns:
        return None
    life._max_gap_ns = Ns(longest_ns)
    return Ns(longest_ns), place
