"""EngineCore: the machine of one worker. Events in, effects out.

One step runs at a time, and the next one may be planned meanwhile, upon tokens that are PENDING.
What turns out to have ended by then has a row too many in it, which counts for nothing.

It owns the sequences' lives: accepts or rejects them, hands planned steps to the executor, turns
results into tokens, and ends sequences. What runs next is the Scheduler's choice; which block holds
what is the KvManager's.
"""

from collections import deque
from typing import NamedTuple, assert_never

from headrace.core.base.errors import InvariantError
from headrace.core.base.events import (
    Arrive,
    CallAt,
    Cancel,
    Computed,
    CopyDone,
    Emit,
    EndLease,
    EngineEffect,
    EngineEvent,
    Expect,
    Finish,
    KvChanged,
    StartCopy,
    StartStep,
    StepDone,
    StepFailed,
    Timer,
)
from headrace.core.base.plan import SeqResult, SeqStep, StepPlan, StepResult, WorkerSpec
from headrace.core.base.request import FinishReason, SeqSpec
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns, SeqId, StepId
from headrace.core.config.schema import WorkerConfig
from headrace.core.engine.admission import find_fault, find_lateness
from headrace.core.engine.stats import EngineStats
from headrace.core.handoff.core import HandoffCore, Held, Wanted, holder
from headrace.core.kv.manager import KvManager
from headrace.core.kv.names import BlockChain, root_name
from headrace.core.scheduler.scheduler import Scheduler
from headrace.core.scheduler.sequence import Sequence, State

# A sequence whose steps fail this often without a token between ends with an error: it may be what
# makes them fail.
MAX_STEP_FAILURES = 3
# Steps of which the host's part is worth hiding. Where they take longer, planning ahead would only
# keep a sequence that arrives waiting for one step more.
OVERLAP_BELOW_NS = Ns(20 * NS_PER_MS)


class _Member(NamedTuple):
    seq: Sequence
    epoch: int  # another one means that the sequence has ended or was preempted since


class _Running(NamedTuple):
    plan: StepPlan
    living: list[_Member]  # of the plan's sequences, in its order


class EngineCore:
    """`handle(now, event) -> effects`. Build one with `build_worker`."""

    def __init__(
        self, config: WorkerConfig, spec: WorkerSpec, kv: KvManager, scheduler: Scheduler
    ) -> None:
        self.config = config
        self.spec = spec
        self._kv = kv
        self._scheduler = scheduler
        self._handoff = HandoffCore(kv)
        self._seqs: dict[SeqId, Sequence] = {}
        self._loading: dict[SeqId, Sequence] = {}  # of these, whose KV is on its way here
        # Copies that begin when this step is done, which may still write to their blocks.
        self._copies: deque[tuple[StepId, StartCopy]] = deque()
        self._steps: deque[_Running] = deque()  # the step that runs, and one planned ahead
        self._last_elapsed_ns = Ns(0)  # of the last step
        self._is_recovering = False  # a step has failed, and with it what was planned upon it
        self._num_arrived = 0
        self._num_steps = self._num_failed_steps = self._num_computed_tokens = 0
        self._now = Ns(0)

    # ---- queries

    @property
    def is_idle(self) -> bool:
        return not (self._seqs or self._steps or self._handoff.is_loading)

    def stats(self) -> EngineStats:
        kv, scheduler = self._kv, self._scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + len(self._loading),
            num_blocks=kv.num_blocks,
            num_free_blocks=kv.num_free,
            num_cached_blocks=kv.num_cached,
            num_pinned_blocks=kv.num_blocks - kv.num_free - kv.num_cached,
            num_lent_blocks=self._handoff.num_blocks,
            num_prefill_tokens=scheduler.num_prefill_tokens,
            num_kv_tokens=sum(seq.num_planned for seq in scheduler.running()),
            num_preemptions=scheduler.num_preemptions,
            num_recomputed_tokens=scheduler.num_recomputed_tokens,
            num_queried_tokens=scheduler.num_queried_tokens,
            num_hit_tokens=scheduler.num_hit_tokens,
            num_steps=self._num_steps,
            num_failed_steps=self._num_failed_steps,
            num_computed_tokens=self._num_computed_tokens,
            num_failed_loads=self._handoff.num_failed_loads,
            full_step_ns=scheduler.cost.told_ns(self.config.scheduler.step_tokens),
        )

    def check(self) -> None:
        """Raise InvariantError unless blocks and sequences are conserved."""
        self._kv.check()
        known = {seq.seq_id for seq in self._scheduler.waiting()} | self._loading.keys()
        known |= {seq.seq_id for seq in self._scheduler.running()}
        if known != self._seqs.keys():
            raise InvariantError("sequence lost", scheduled=len(known), alive=len(self._seqs))
        num_held = self._kv.num_blocks - self._kv.num_free - self._kv.num_cached
        if not self._seqs and num_held != self._handoff.num_blocks:
            raise InvariantError(
                "blocks held by nobody", free=self._kv.num_free, cached=self._kv.num_cached
            )

    # ---- the machine

    def handle(self, now: Ns, event: EngineEvent) -> list[EngineEffect]:
        if now < self._now:
            raise InvariantError("time went back", last=self._now, now=now)
        self._now = now
        effects: list[EngineEffect] = []
        match event:
            case Arrive(seqs):
                for spec in seqs:
                    self._arrive(now, spec, effects)
            case Cancel(seq_id, reason):
                self._end(seq_id, reason, effects)
            case Timer(timer_id) if timer_id < 0:
                for seq_id in self._handoff.expire(timer_id, now):
                    self._scheduler.add(self._loading.pop(seq_id), now)
            case Timer(timer_id):
                self._end(SeqId(timer_id), FinishReason.DEADLINE, effects)
            case StepDone(result):
                self._step_done(result, effects)
                self._start_copies(result.step_id, effects)
            case StepFailed(step_id, error):
                self._step_failed(now, step_id, error, effects)
                self._start_copies(step_id, effects)
            case CopyDone():
                self._copy_done(now, event, effects)
            case EndLease(seq_id):
                self._handoff.end_lease(seq_id)
            case Expect():
                until = self._lease_end
                self._hold(self._expect(event, until), until, effects)
            case Computed(seq_id, num_tokens):
                until = self._lease_end
                self._hold(self._handoff.offer(seq_id, num_tokens, until), until, effects)
            case _:
                assert_never(event)
        if not self._steps:
            self._is_recovering = False
            self._start_step(now, effects)
            is_stuck = not self._steps and self._scheduler.num_waiting > 0
            if is_stuck and self._handoff.disappoint():
                self._start_step(now, effects)
        if len(self._steps) == 1 and self._plans_ahead(self._steps[0].plan):
            self._start_step(now, effects, is_ahead=True)
        changes = self._kv.drain_changes()
        if changes:
            effects.append(KvChanged(changes))
        return effects

    def _start_step(self, now: Ns, effects: list[EngineEffect], *, is_ahead: bool = False) -> None:
        plan, happened = self._scheduler.plan(now, is_ahead=is_ahead)
        effects.extend(happened)
        if plan is not None:
            seqs = (self._seqs[share.seq_id] for share in plan.seqs)
            self._steps.append(_Running(plan, [_Member(seq, seq.epoch) for seq in seqs]))
            effects.append(StartStep(plan))

    def _plans_ahead(self, running: StepPlan) -> bool:
        """Whether to plan the step after this one before it is done."""
        if self._is_recovering:
            return False
        match self.config.scheduler.overlap:
            case "on":
                return True
            case "auto":
                only_decodes = len(running.seqs) == running.num_tokens
                return only_decodes and 0 < self._last_elapsed_ns < OVERLAP_BELOW_NS
            case _:
                return False

    # ---- arrival

    def _arrive(self, now: Ns, spec: SeqSpec, effects: list[EngineEffect]) -> None:
        if spec.seq_id in self._seqs:
            raise InvariantError("sequence id used twice", seq_id=spec.seq_id)
        reject = find_fault(spec, self.spec, self.config.scheduler, self._kv, self._scheduler)
        if reject is None:
            chain = self._chain(spec.adapter, spec.salt, spec.prompt_tokens)
            seq = Sequence(spec, self._num_arrived, now, chain)
            if self.config.scheduler.early_reject:
                reject = find_lateness(seq, now, self._scheduler.predict_ttft_ns(seq))
        if reject is not None:
            self._handoff.end_lease(spec.seq_id)  # of what was held for it
            effects.append(reject)
            return
        self._num_arrived += 1
        self._seqs[spec.seq_id] = seq
        if not self._load(seq, effects):
            self._scheduler.add(seq, now)
        if spec.deadline_ns is None:
            return
        if spec.deadline_ns <= now:
            self._finish(seq, FinishReason.DEADLINE, effects)
        else:
            effects.append(CallAt(spec.deadline_ns, spec.seq_id))

    def _chain(self, adapter: str, salt: str, tokens: tuple[int, ...]) -> BlockChain:
        of = self.spec
        root = root_name(of.model_digest, of.kv_dtype, of.block_size, adapter, salt)
        return BlockChain.of(root, of.block_size, tokens)

    # ---- KV of other workers

    def _load(self, seq: Sequence, effects: list[EngineEffect]) -> bool:
        """Whether the sequence waits for KV that comes from elsewhere, which it does only so long
        in all.
        """
        until = Ns(seq.queued_ns + round(self.config.kv.load_timeout_s * NS_PER_S))
        if until <= self._now:
            return False
        spec = seq.spec
        wanted = Wanted(seq.chain, spec.kv_source, spec.num_source_blocks)
        num_kept = self._scheduler.num_kept if wanted.source else 0
        held = self._handoff.load(seq.seq_id, wanted, seq.reusable_tokens, until, num_kept)
        self._hold(held, until, effects)
        if held.handle is not None:
            self._loading[seq.seq_id] = seq
        return held.handle is not None

    def _expect(self, coming: Expect, until: Ns) -> Held:
        chain = self._chain(coming.adapter, coming.salt, coming.tokens)
        wanted = Wanted(chain, coming.source)
        num_kept = self._scheduler.num_promised_blocks
        return self._handoff.expect(coming.seq_id, wanted, until, num_kept)

    def _hold(self, held: Held, until: Ns, effects: list[EngineEffect]) -> None:
        self._copy(held.copy, effects)
        if held.handle is not None:
            effects.append(CallAt(until, holder(held.handle)))

    def _copy(self, copy: StartCopy | None, effects: list[EngineEffect]) -> None:
        """When those steps are done that may still use its blocks."""
        if copy is None:
            return
        if self._steps:
            self._copies.append((self._steps[-1].plan.step_id, copy))
        else:
            effects.append(copy)

    def _start_copies(self, step_id: StepId, effects: list[EngineEffect]) -> None:
        """What waited for this step."""
        while self._copies and self._copies[0][0] <= step_id:
            effects.append(self._copies.popleft()[1])

    def _copy_done(self, now: Ns, done: CopyDone, effects: list[EngineEffect]) -> None:
        """Schedule those who waited for it, with what has come; if that was all that was asked for,
        some may want more.
        """
        waiting, copy = self._handoff.end(done)
        self._copy(copy, effects)
        for seq_id in waiting:
            seq = self._loading.pop(seq_id)
            if done.error or not self._load(seq, effects):
                self._scheduler.add(seq, now)

    @property
    def _lease_end(self) -> Ns:
        return Ns(self._now + round(self.config.kv.lease_s * NS_PER_S))

    # ---- results

    def _step_done(self, result: StepResult, effects: list[EngineEffect]) -> None:
        step = self._take_step(result.step_id)
        self._last_elapsed_ns = result.elapsed_ns
        self._scheduler.learn(step.plan, result.elapsed_ns)
        self._num_steps += 1
        self._num_computed_tokens += step.plan.num_tokens
        if len(step.plan.seqs) != len(result.seqs):
            raise InvariantError("step result is not as long as its plan", step_id=result.step_id)
        for share, outcome, living in zip(step.plan.seqs, result.seqs, step.living, strict=True):
            if share.seq_id != outcome.seq_id:
                raise InvariantError("step result is out of order", step_id=result.step_id)
            if living.seq.epoch == living.epoch:
                self._apply(living.seq, share, outcome, effects)

    def _apply(
        self, seq: Sequence, share: SeqStep, outcome: SeqResult, effects: list[EngineEffect]
    ) -> None:
        if outcome.error and seq.ending is None:
            self._finish(seq, FinishReason.ERROR, effects, error=outcome.error)
            return
        sampled = () if seq.ending else outcome.tokens
        self._scheduler.advance(seq, share, sampled)
        if seq.ending is not None:
            self._finish(seq, seq.ending, effects)
            return
        scores = outcome.prompt_logprobs and seq.take_scores(share.start, outcome.prompt_logprobs)
        if sampled or scores:
            effects.append(Emit(seq.seq_id, sampled, outcome.logprobs, scores))
        if sampled:
            seq.num_failures = 0
            self._end_if_complete(seq, sampled[-1], effects)
        elif seq.spec.is_leased:
            effects.append(Computed(seq.seq_id, seq.num_computed))

    def _end_if_complete(self, seq: Sequence, token: int, effects: list[EngineEffect]) -> None:
        spec, params = seq.spec, seq.spec.params
        if seq.num_output >= params.min_tokens and (
            token in params.stop_token_ids
            or (token in spec.eos_token_ids and not params.ignore_eos)
        ):
            self._finish(seq, FinishReason.STOP, effects, stop_token_id=token)
        elif seq.num_output >= params.max_tokens or len(seq.tokens) >= self.spec.max_model_len:
            self._finish(seq, FinishReason.LENGTH, effects)

    def _step_failed(self, now: Ns, step_id: int, error: str, effects: list[EngineEffect]) -> None:
        """Nothing of a failed step counts: its sequences are recomputed, and given up when it
        happens again and again. So does nothing that was planned upon it.
        """
        self._is_recovering = True
        self._num_failed_steps += 1
        for seq, epoch in self._take_step(step_id).living:
            if seq.epoch != epoch:
                continue
            seq.num_failures += 1
            if seq.ending is not None:
                self._finish(seq, seq.ending, effects)
            elif seq.num_failures >= MAX_STEP_FAILURES:
                self._finish(seq, FinishReason.ERROR, effects, error=error)
            else:
                effects.append(self._scheduler.preempt(seq, now, f"step failed: {error}"))

    def _take_step(self, step_id: int) -> "_Running":
        """The oldest of those that run, which has ended."""
        if not self._steps or self._steps[0].plan.step_id != step_id:
            raise InvariantError("result of a step that does not run", step_id=step_id)
        return self._steps.popleft()

    # ---- ends

    def _end(self, seq_id: SeqId, reason: FinishReason, effects: list[EngineEffect]) -> None:
        """End a sequence now, or as soon as the running step no longer writes to its blocks.
        Idempotent.
        """
        seq = self._seqs.get(seq_id)
        if seq is None:
            return
        if seq.num_in_flight:
            seq.ending = seq.ending or reason
        else:
            self._finish(seq, reason, effects)

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        effects: list[EngineEffect],
        *,
        stop_token_id: int | None = None,
        error: str = "",
    ) -> None:
        if self._loading.pop(seq.seq_id, None) is not None:
            self._handoff.give_up(seq.seq_id)
            seq.move(State.FINISHED)
        else:
            if seq.spec.is_leased and reason is FinishReason.LENGTH:
                handle = self._handoff.lend(seq.seq_id)
                effects.append(CallAt(self._lease_end, holder(handle)))
            self._scheduler.remove(seq)
        seq.reset(seq.num_computed)
        del self._seqs[seq.seq_id]
        effects.append(
            Finish(
                seq_id=seq.seq_id,
                reason=reason,
                num_prompt_tokens=seq.num_prompt,
                num_output_tokens=seq.num_output,
                num_cached_tokens=seq.first_num_cached or 0,
                num_preemptions=seq.num_preemptions,
                stop_token_id=stop_token_id,
                error=error,
            )
        )
