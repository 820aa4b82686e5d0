"""One living sequence: where its time went so far, and its tokens' gaps.

`mark_ns` is the time up to which everything is accounted for. Whatever touches the sequence first
accounts for what passed since; nobody touches it otherwise, so a token costs the same however many
sequences live.
"""

from bisect import bisect_left

from headrace.core.base.events import Finish
from headrace.core.base.metrics import e2e_ns, tpot_ns, ttft_ns
from headrace.core.base.request import SeqSpec, Slo
from headrace.core.base.types import Ns
from headrace.core.telemetry.parts import (
    DECODE,
    DECODE_INTERFERENCE,
    KV_LOAD,
    OTHERS_PREFILL,
    OWN_PREFILL,
    PREEMPTION,
    QUEUE,
    ROUTER_WAIT,
    TRANSFER,
    Cause,
    TimeParts,
)
from headrace.core.telemetry.record import ITL_BOUNDS_NS, ItlSummary, RequestRecord
from headrace.core.telemetry.steps import Share, StepLedger


class Life:
    """A sequence between its arrival and its end."""

    __slots__ = (
        "_gap_spent",
        "_gaps",
        "_ledger",
        "_ledger_mark",
        "_max_gap_ns",
        "_spent",
        "_token_spent",
        "_ttft_spent",
        "admitted_ns",
        "arrived_ns",
        "copies",
        "first_token_ns",
        "is_in_step",
        "is_waiting",
        "last_token_ns",
        "mark_ns",
        "num_preemptions",
        "num_prompt",
        "regain",
        "request_id",
        "seq_id",
        "slo",
    )

    def __init__(self, spec: SeqSpec, slo: Slo, now: Ns, ledger: StepLedger) -> None:
        self.seq_id = spec.seq_id
        self.request_id = spec.request_id
        self.slo = slo
        self.num_prompt = len(spec.prompt_tokens)
        # A server and an engine on one clock cannot disagree; a careless client of the engine can.
        self.arrived_ns = min(spec.arrived_ns, now)
        self.admitted_ns: Ns | None = None
        self.first_token_ns: Ns | None = None
        self.last_token_ns: Ns | None = None
        self.is_waiting = True
        self.is_in_step = False
        self.regain = 0  # tokens that were computed once and are not computed again yet
        self.num_preemptions = 0
        self.copies: dict[int, int] = {}  # copies that it waits for, with the cause of the wait
        self.mark_ns = now
        self._ledger = ledger
        self._ledger_mark = ledger.at(now)
        self._spent = [0] * len(Cause)
        self._spent[ROUTER_WAIT] = now - self.arrived_ns
        self._ttft_spent: list[int] | None = None
        self._token_spent: list[int] = []  # at the last token
        self._gap_spent: list[int] | None = None  # in the longest gap
        self._max_gap_ns = -1
        self._gaps = [0] * (len(ITL_BOUNDS_NS) + 1)

    # ---- time

    def pass_time(self, now: Ns) -> None:
        """Account for time outside steps that contain the sequence."""
        gap_ns = now - self.mark_ns
        if not gap_ns:
            return
        spent = self._spent
        prefill, decode = self._ledger.at(now)
        if self.regain or (self.is_waiting and self.num_preemptions):
            spent[PREEMPTION] += gap_ns
        elif self.copies:
            spent[max(self.copies.values())] += gap_ns
        elif self.is_waiting:
            spent[QUEUE] += gap_ns
        else:  # admitted, but the steps' budgets went to others
            prefill_ns = prefill - self._ledger_mark[0]
            decode_ns = decode - self._ledger_mark[1]
            spent[OTHERS_PREFILL] += prefill_ns
            spent[DECODE_INTERFERENCE] += decode_ns
            spent[QUEUE] += gap_ns - prefill_ns - decode_ns
        self.mark_ns = now
        self._ledger_mark = (prefill, decode)

    def pass_step(self, now: Ns, share: Share, split: tuple[int, int, int, int]) -> None:
        """Account for a step that contained the sequence."""
        own, lost, others_prefill, others_decode = split
        spent = self._spent
        spent[DECODE if share.starts_output else OWN_PREFILL] += own
        spent[PREEMPTION] += lost
        spent[OTHERS_PREFILL] += others_prefill
        spent[DECODE_INTERFERENCE] += others_decode
        if share.end >= self.regain:
            self.regain = 0
        self._leave_step(now)

    def lose_step(self, now: Ns) -> None:
        """Account for a step that failed: its work is lost."""
        self._spent[PREEMPTION] += now - self.mark_ns
        self._leave_step(now)

    def _leave_step(self, now: Ns) -> None:
        self.is_in_step = False
        self.mark_ns = now
        self._ledger_mark = self._ledger.at(now)

    # ---- what happens to it

    def admit(self, now: Ns, num_cached: int) -> None:
        self.pass_time(now)
        self.is_waiting = False
        if self.admitted_ns is None:
            self.admitted_ns = now
        if num_cached >= self.regain:
            self.regain = 0

    def preempt(self, now: Ns, num_lost: int) -> None:
        self.pass_time(now)
        self.is_waiting = True
        self.num_preemptions += 1
        self.regain = max(self.regain, num_lost)

    def start_copy(self, now: Ns, copy_id: int, *, is_handoff: bool) -> None:
        if not self.is_in_step:
            self.pass_time(now)
        self.copies[copy_id] = TRANSFER if is_handoff else KV_LOAD

    def end_copy(self, now: Ns, copy_id: int) -> None:
        if not self.is_in_step:
            self.pass_time(now)
        self.copies.pop(copy_id, None)

    def start_step(self, now: Ns) -> None:
        self.pass_time(now)
        self.is_in_step = True

    def emit(self, now: Ns, num_tokens: int) -> None:
        """Tokens were sent. Those of one Emit have gaps of 0 between them."""
        if now != self.mark_ns:  # for whoever sees no steps
            self.pass_time(now)
        if self.last_token_ns is None:
            self.first_token_ns = now
            self._ttft_spent = self._token_spent = self._spent.copy()
        else:
            self._note_gap(Ns(now - self.last_token_ns))
        self.last_token_ns = now
        for _ in range(num_tokens - 1):
            self._note_gap(Ns(0))

    def _note_gap(self, gap_ns: Ns) -> None:
        self._gaps[bisect_left(ITL_BOUNDS_NS, gap_ns)] += 1
        before, self._token_spent = self._token_spent, self._spent.copy()
        if gap_ns > self._max_gap_ns:
            self._max_gap_ns = gap_ns
            self._gap_spent = [
                end - start for end, start in zip(self._token_spent, before, strict=True)
            ]

    # ---- its end

    def record(self, now: Ns, finish: Finish) -> RequestRecord:
        self.pass_time(now)
        e2e = e2e_ns(self.arrived_ns, now)
        first, last = self.first_token_ns, self.last_token_ns
        ttft = None if first is None else ttft_ns(self.arrived_ns, first)
        num_output = finish.num_output_tokens
        between_ns = 0 if first is None or last is None else last - first
        return RequestRecord(
            request_id=self.request_id,
            seq_id=self.seq_id,
            arrived_ns=self.arrived_ns,
            admitted_ns=self.admitted_ns,
            first_token_ns=first,
            finished_ns=now,
            reason=finish.reason,
            num_prompt_tokens=finish.num_prompt_tokens,
            num_output_tokens=num_output,
            num_cached_tokens=finish.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            ttft_ns=ttft,
            tpot_ns=None if ttft is None else tpot_ns(e2e, ttft, num_output),
            e2e_ns=e2e,
            itl=ItlSummary(
                sum(self._gaps), Ns(between_ns), Ns(max(self._max_gap_ns, 0)), tuple(self._gaps)
            ),
            slo=self.slo,
            time=_parts(self._spent),
            ttft_time=None if self._ttft_spent is None else _parts(self._ttft_spent),
            worst_gap_time=None if self._gap_spent is None else _parts(self._gap_spent),
        ).judged()


def _parts(spent: list[int]) -> TimeParts:
    return TimeParts(*map(Ns, spent))
