"""Many decode steps told to a Telemetry at once: what a simulation that glides over them knows.

Every latency is what telling them one by one gives. How the time of a run divides between a
sequence's own tokens and those beside it is taken from its first and its last step.

It is the fold's own matter, so it knows what is inside.
"""

from bisect import bisect_left
from collections.abc import Sequence
from operator import sub

from headrace.core.base.plan import StepPlan
from headrace.core.base.types import Ns, SeqId
from headrace.core.telemetry.fold import Telemetry
from headrace.core.telemetry.joined import ClusterTelemetry
from headrace.core.telemetry.life import Life
from headrace.core.telemetry.parts import DECODE, DECODE_INTERFERENCE
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
        _note_run(life, times_ns, own_share=1.0)
        life.last_token_ns = Ns(times_ns[-1] + delay_ns)


def pass_decoding(
    telemetry: Telemetry, ends_ns: Sequence[Ns], last_plan: StepPlan, plans: Sequence[StepPlan]
) -> None:
    """The step that runs, and others of the same sequences after it, up to one like `last_plan`,
    ended at these times, with a token for everybody; now `plans` run.
    """
    first = telemetry._step
    assert first is not None
    now = ends_ns[-1]
    shares = {seq.seq_id: telemetry._share(seq) for seq in last_plan.seqs}
    last = RunningStep(last_plan, now, shares, telemetry.cost)
    is_running = last_plan is plans[0]
    total_ns = now - first.started_ns
    ledger = telemetry._ledger
    prefill_ns, decode_ns = ledger.at(first.started_ns)
    ledger.end(first.started_ns)
    ledger._done = (prefill_ns, decode_ns + total_ns)
    for seq_id, share in first.shares.items():
        life = telemetry._lives.get(seq_id)
        if life is None:
            continue
        own_ns = first.split(share, total_ns)[0] + last.split(shares[seq_id], total_ns)[0]
        own_ns //= 2
        _note_run(life, ends_ns, own_share=own_ns / total_ns)
        life._spent[DECODE] += own_ns
        life._spent[DECODE_INTERFERENCE] += total_ns - own_ns
        life._token_spent = life._spent.copy()
        life._leave_step(now)
        life.is_in_step = is_running
    plan_ahead(telemetry, plans)
    if is_running:
        telemetry._run(last)
    else:
        telemetry._start_step(now, plans[0])


def plan_ahead(telemetry: Telemetry, plans: Sequence[StepPlan]) -> None:
    """The first of `plans` runs, as is known already; the others are to follow it."""
    telemetry._ahead.clear()
    telemetry._ahead.extend(plans[1:])


def _note_run(life: Life, times_ns: Sequence[Ns], own_share: float) -> None:
    assert life.last_token_ns is not None
    gaps = [times_ns[0] - life.last_token_ns, *map(sub, times_ns[1:], times_ns)]
    life.last_token_ns = times_ns[-1]
    longest = max(gaps)
    bucket = bisect_left(ITL_BOUNDS_NS, longest)
    if bisect_left(ITL_BOUNDS_NS, min(gaps)) == bucket:
        life._gaps[bucket] += len(gaps)
    else:
        for gap in gaps:
            life._gaps[bisect_left(ITL_BOUNDS_NS, gap)] += 1
    if longest > life._max_gap_ns:
        life._max_gap_ns = longest
        spent = [0] * len(life._spent)
        spent[DECODE] = round(longest * own_share)
        spent[DECODE_INTERFERENCE] = longest - spent[DECODE]
        life._gap_spent = spent
