"""The scheduler: which tokens of which sequences the next step computes.

There is no prefill phase and no decode phase. A sequence has known tokens (prompt + output) and
computed tokens; a step lets computed catch up with known under a token budget. Chunked prefill,
prefix hits and recomputation after preemption are all this one case (the idea is vLLM V1's).

The order within a step: running sequences that need one token (their ITL is at stake, and they cost
one token each); then prompts, within what the budget policy leaves for them, by lanes (`lanes.py`):
those that run before those that wait, these as the order policy says.

A step may be planned while another one runs. Steps run in the order of their plans, so blocks that
are given up may be given to another sequence at once: whoever still reads or writes them does so
before the next step begins.
"""

from collections.abc import Iterator

from headrace.core.base.events import Admitted, EngineEffect, Preempted
from headrace.core.base.plan import SeqStep, StepPlan
from headrace.core.base.types import NS_PER_MS, Ns, SeqId, StepId
from headrace.core.config.schema import SchedulerConfig
from headrace.core.cost.learned import LearnedCost
from headrace.core.cost.model import CostModel, StepShape
from headrace.core.kv.manager import KvManager
from headrace.core.scheduler.burst import Burst
from headrace.core.scheduler.forecast import count_prefill, predict_ttft_ns
from headrace.core.scheduler.lanes import DeficitRoundRobin, ShortShare
from headrace.core.scheduler.policies import promised_tokens, victim_for
from headrace.core.scheduler.promises import Promises
from headrace.core.scheduler.room import Company, room_of
from headrace.core.scheduler.sequence import Sequence, State
from headrace.core.scheduler.shares import share_of
from headrace.core.scheduler.step import StepDraft
from headrace.core.scheduler.twins import Twins
from headrace.core.scheduler.waiting import WaitingQueue, queue_key


class Scheduler:
    """Holds the waiting and the running sequences, and plans steps for them."""

    def __init__(self, config: SchedulerConfig, kv: KvManager, cost: CostModel) -> None:
        self._config = config
        self._kv = kv
        self.cost = LearnedCost(cost)
        self._waiting = WaitingQueue(config, kv)
        self._running: dict[SeqId, Sequence] = {}
        self._promises = Promises(config, kv, self._running)
        self._twins = Twins(kv)
        self._burst = Burst()
        self._short_share = ShortShare(config.short_prompt_share)
        self._long_turns = DeficitRoundRobin()  # of running sequences whose prompt is long
        self._last_victim: SeqId | None = None
        self._next_step_id = 0
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    # ---- queries

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def waiting(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def running(self) -> Iterator[Sequence]:
        return iter(self._running.values())

    @property
    def num_prefill_tokens(self) -> int:
        """Known tokens yet to be computed, beside what the cache holds and the next token of each
        sequence that decodes.
        """
        return count_prefill(self._kv, self._waiting, self._running.values())

    @property
    def num_promised_blocks(self) -> int:
        """Blocks that running sequences were promised and do not hold yet."""
        return self._promises.num_blocks

    @property
    def num_kept(self) -> int:
        """Of these, the blocks that nobody else may take, as they were promised for good."""
        return self._promises.num_kept

    @property
    def usual_itl_ms(self) -> float:
        """The target of sequences that state none."""
        return self._burst.itl_ms(self._config)

    def predict_ttft_ns(self, seq: Sequence) -> Ns:
        """Predicted time until a sequence that arrives now has its first token."""
        return predict_ttft_ns(
            self._config, self.cost, self._kv, seq, self._waiting, self._running.values()
        )

    # ---- changes

    def add(self, seq: Sequence, now: Ns) -> None:
        """Let a sequence wait, at the place that its order gives it."""
        self._burst.arrive(seq, now, is_idle=not (self._running or self._waiting))
        self._waiting.add(seq, now)

    def learn(self, plan: StepPlan, elapsed_ns: Ns) -> None:
        """A step took this long: what the budget policy's predictions are made of."""
        if self._learns:
            self.cost.learn(plan, elapsed_ns)

    @property
    def learns_from_decoding(self) -> bool:
        """Whether steps that only decode are learned from once for many."""
        return not self._learns or self.cost.is_reliable

    def learned_among(self, first: StepId, num_steps: int) -> range:
        """Which of so many steps that only decode, counted from 0, are learned from."""
        return self.cost.learned_among(first, num_steps) if self._learns else range(0)

    def learn_shape(self, step_id: StepId, shape: StepShape, elapsed_ns: Ns) -> None:
        """As `learn`, without the step's plan."""
        if self._learns:
            self.cost.learn_shape(step_id, shape, elapsed_ns)

    @property
    def _learns(self) -> bool:
        return self._config.budget == "itl" or self._config.early_reject

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out for good."""
        self._burst.leave(seq.seq_id)
        if seq.state is State.RUNNING:
            del self._running[seq.seq_id]
            self._twins.forget(seq)
            self._long_turns.leave(seq.seq_id)
            self._kv.release(seq.seq_id)
        else:
            self._waiting.remove(seq)
        seq.move(State.FINISHED)

    def advance(self, seq: Sequence, share: SeqStep, sampled: tuple[int, ...]) -> None:
        """A step computed this share of the sequence and chose `sampled` after it."""
        size = self._kv.block_size
        first = seq.num_computed // size
        seq.land(share, sampled)
        if sampled:
            self._burst.leave(seq.seq_id)
        if seq.is_long and seq.num_remaining <= 1:
            seq.is_long = False
            self._long_turns.leave(seq.seq_id)
        if seq.num_computed // size > first:
            self._twins.arrived(seq.chain.names[first : seq.num_computed // size])
            self._kv.commit(seq.seq_id, seq.chain, seq.num_computed)

    def preempt(self, seq: Sequence, now: Ns, reason: str) -> Preempted:
        """Let the sequence wait again, without its blocks; the full ones stay cached for now."""
        del self._running[seq.seq_id]
        self._twins.forget(seq)
        self._long_turns.leave(seq.seq_id)
        self._kv.release(seq.seq_id)
        lost = seq.num_computed
        seq.move(State.WAITING)
        seq.reset()
        seq.num_preemptions += 1
        seq.queued_ns = now
        self.num_preemptions += 1
        self.num_recomputed_tokens += lost
        self.add(seq, now)
        return Preempted(seq.seq_id, reason, lost)

    def plan(
        self, now: Ns, *, is_ahead: bool = False
    ) -> tuple[StepPlan | None, list[EngineEffect]]:
        """The next step (None: nothing can run), and what happened to sequences on the way.

        `is_ahead`: a step runs, whose outcome is not known. Then nobody is preempted, since whoever
        ends with that step may make room; None also where somebody would have to be.
        """
        decoding: list[Sequence] = []
        prompts: list[Sequence] = []
        for seq in self._running.values():
            if not is_ahead or seq.goes_on:
                num_remaining = seq.num_remaining
                if num_remaining == 1:
                    decoding.append(seq)
                elif num_remaining > 1:
                    prompts.append(seq)
        step = StepDraft(self._config.step_tokens, is_ahead=is_ahead)
        self._plan_decoding(decoding, step, now)
        if (prompts or self._waiting) and not step.is_abandoned:
            self.plan_prompts(Company.of(decoding, self.usual_itl_ms), prompts, step, now)
        if step.is_abandoned or not step.seqs:
            return None, step.effects
        shares = tuple(step.seqs.values())
        for share in shares:
            self._running[share.seq_id].launch(share)
        plan = StepPlan(StepId(self._next_step_id), shares, tuple(step.copies), is_ahead)
        self._next_step_id += 1
        return plan, step.effects

    def _plan_decoding(self, decoding: list[Sequence], step: StepDraft, now: Ns) -> None:
        """One token each, for which most have room in a block that they hold."""
        kv, size = self._kv, self._kv.block_size
        if len(decoding) > 1:
            decoding.sort(key=queue_key)
        for seq in decoding:
            if seq.state is State.RUNNING and step.budget > 0:
                block_ids = kv.block_ids(seq.seq_id)
                if len(block_ids) * size > seq.num_planned:
                    step.put(share_of(seq, 1, block_ids), is_long=seq.is_long)
                    continue
            self._grow_share(seq, 1, step, now)

    def plan_prompts(
        self, company: Company, prompts: list[Sequence], step: StepDraft, now: Ns
    ) -> None:
        """The rest of a step in which `company` decodes: each lane its guaranteed part, then
        whatever is left to whoever can use it.
        """
        room = room_of(self._config, self.cost, company, prompts, self._short_share)
        has_long = any(seq.is_long for seq in prompts) or self._waiting.num_long > 0
        # Whoever waits may be short, since the cache decides that; nothing is lost if nobody is.
        has_short = not all(seq.is_long for seq in prompts) or bool(self._waiting)
        num_short = 0
        if has_short:
            part = room.short(has_long=has_long)
            self._fill(step, now, num_short=part)
            num_short = part - step.left(is_long=False)
        if has_long and not step.is_abandoned:
            part = room.long(num_short, is_empty=step.is_empty)
            self._fill(step, now, num_long=part)
            num_long = part - step.left(is_long=True)
            if has_short and not step.is_abandoned:
                self._fill(step, now, num_short=room.rest(num_short, num_long))

    def _fill(self, step: StepDraft, now: Ns, *, num_short: int = 0, num_long: int = 0) -> None:
        """With so many more tokens of each lane. A turn of the long one is left to who joins it."""
        step.open_lanes(num_short=num_short, num_long=num_long)
        if num_short or self._waiting.num_long:
            num_joining = len(self._long_turns) < self._config.max_long_prefills
            self._plan_running(step, now, num_joining)
            self._plan_waiting(step, now)
        if num_long:
            self._plan_running(step, now)

    # ---- running sequences

    def _plan_running(self, step: StepDraft, now: Ns, num_joining: int = 0) -> None:
        """Short ones in the order of their queue, long ones by turns, beside so many that join."""
        prompts = [s for s in self._running.values() if s.num_remaining > 1 and s.goes_on]
        for seq in sorted(prompts, key=queue_key):
            if not seq.is_long:
                num_tokens = min(self._num_wanted(seq, step), step.left(is_long=False))
                self._grow_share(seq, num_tokens, step, now)
        wants = {seq.seq_id: self._num_wanted(seq, step) for seq in prompts if seq.is_long}
        num_turns = len(self._long_turns)
        num_long = -(-step.left(is_long=True) * num_turns // max(1, num_turns + num_joining))
        for seq_id, num_tokens in self._long_turns.allot(wants, num_long).items():
            self._grow_share(self._running.get(seq_id), num_tokens, step, now)

    def _num_wanted(self, seq: Sequence, step: StepDraft) -> int:
        """Tokens that a running sequence could take beside those that it has in the step."""
        return min(seq.num_remaining, self._chunk_limit) - step.num_tokens(seq.seq_id)

    def _grow_share(self, seq: Sequence | None, num_more: int, step: StepDraft, now: Ns) -> None:
        """Give a sequence more tokens of the step; nothing to victims of the same step."""
        num_more = min(num_more, step.budget)
        if num_more <= 0 or seq is None or seq.state is not State.RUNNING:
            return
        num_tokens = step.num_tokens(seq.seq_id) + num_more
        if self._make_room(seq, seq.num_planned + num_tokens, step, now):
            self._schedule(seq, num_tokens, step)

    def _make_room(self, seq: Sequence, num_tokens: int, step: StepDraft, now: Ns) -> bool:
        """Let the sequence grow at the cost of others; False = it had to be preempted itself."""
        while not self._promises.grow(seq, num_tokens, step):
            if step.is_ahead:
                step.is_abandoned = not step.has_admitted
                return False
            running = self._running.values()
            victim = victim_for(self._config, seq, running, step.seqs, self._last_victim) or seq
            step.give_back(victim.seq_id)
            victim.num_times_victim += 1
            step.effects.append(
                self.preempt(victim, now, f"no room for sequence {seq.seq_id} to grow")
            )
            step.has_preempted = True
            self._last_victim = victim.seq_id
            if victim is seq:
                return False
        return True

    # ---- waiting sequences

    def _plan_waiting(self, step: StepDraft, now: Ns) -> None:
        """Admit in order; what does not fit is overtaken, within a window and an age limit. Nobody
        is admitted to a step that had to preempt.
        """
        if not self._waiting or step.has_preempted or step.is_abandoned:
            return
        num_passed, num_reserved = 0, self.num_promised_blocks
        # Each sequence that runs may need its token in the same step.
        limit = min(self._config.max_running_seqs, self._config.step_tokens)
        for seq in self._waiting.candidates(now):
            if step.is_full or len(self._running) >= limit:
                break
            # Nobody needs less than one block: the last known token never comes from the cache.
            if (
                num_passed > self._config.skip_ahead_window
                or self._kv.num_available <= num_reserved
            ):
                break
            seq.is_long = self._waiting.is_long(seq)
            if self._is_lane_closed(seq, step):
                continue
            if self._twins.waits(seq):
                num_passed += 1
                continue
            seq.promised_tokens = promised_tokens(self._config, seq)
            num_needed = self._promises.num_needed(seq)
            if num_needed > self._kv.num_available - num_reserved:
                num_passed += 1
                if now - seq.queued_ns >= self._config.skip_ahead_age_ms * NS_PER_MS:
                    break
                continue
            if not self._admit(seq, step):
                break
            num_reserved += self._promises.num_left(seq)

    def _is_lane_closed(self, seq: Sequence, step: StepDraft) -> bool:
        if seq.is_long and len(self._long_turns) >= self._config.max_long_prefills:
            return True
        return step.left(is_long=seq.is_long) <= 0

    def _admit(self, seq: Sequence, step: StepDraft) -> bool:
        hit = self._kv.admit(seq.seq_id, seq.chain, seq.tokens, seq.reusable_tokens)
        num_tokens = min(
            self._chunk_limit, step.left(is_long=seq.is_long), len(seq.tokens) - hit.num_tokens
        )
        if not self._kv.reserve(seq.seq_id, hit.num_tokens + num_tokens):
            self._kv.release(seq.seq_id)
            return False
        self._waiting.remove(seq)
        seq.move(State.RUNNING)
        seq.reset(hit.num_tokens)
        step.has_admitted = True
        self._running[seq.seq_id] = seq
        self._twins.add(seq)
        if seq.is_long:
            self._long_turns.join(seq.seq_id)
        if seq.first_num_cached is None:
            seq.first_num_cached = hit.num_tokens
            self.num_queried_tokens += len(seq.tokens)
            self.num_hit_tokens += hit.num_tokens
        if hit.copy is not None:
            step.copies.append(hit.copy)
        step.effects.append(Admitted(seq.seq_id, hit.num_tokens))
        self._schedule(seq, num_tokens, step)
        return True

    # ---- one sequence's share

    @property
    def _chunk_limit(self) -> int:
        return self._config.chunk_tokens or self._config.step_tokens

    def _schedule(self, seq: Sequence, num_tokens: int, step: StepDraft) -> None:
        step.put(share_of(seq, num_tokens, self._kv.block_ids(seq.seq_id)), is_long=seq.is_long)
