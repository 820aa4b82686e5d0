"""The scheduler: which tokens of which sequences the next step computes.

There is no prefill phase and no decode phase. A sequence has known tokens (prompt + output) and
computed tokens; a step lets computed catch up with known under a token budget. Chunked prefill,
prefix hits and recomputation after preemption are all this one case (the idea is vLLM V1's).

The order within a step: running sequences that need one token (their ITL is at stake, and they cost
one token each), then other running ones by arrival, then waiting ones as the order policy says. At
most one step runs at a time.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from headrace.core.base.errors import InvariantError
from headrace.core.base.events import Admitted, EngineEffect, Preempted
from headrace.core.base.plan import BlockCopy, SampleSpec, SeqStep, StepPlan
from headrace.core.base.types import NS_PER_MS, Ns, SeqId, StepId
from headrace.core.config.schema import SchedulerConfig
from headrace.core.cost.model import CostModel, StepShape
from headrace.core.kv.manager import KvManager
from headrace.core.scheduler.policies import (
    ORDERS,
    STATIC_ORDERS,
    choose_victim,
    is_protected,
    promised_tokens,
    step_budget,
)
from headrace.core.scheduler.sequence import Sequence, State

# Orders that change from step to step are evaluated for this many of the longest waiting sequences
# only.
DYNAMIC_ORDER_WINDOW = 128
# A sequence waits for a twin only where that saves at least this many blocks of prefill.
MIN_TWIN_BLOCKS = 2


class Scheduler:
    """Holds the waiting and the running sequences, and plans steps for them."""

    def __init__(self, config: SchedulerConfig, kv: KvManager, cost: CostModel) -> None:
        self._config = config
        self._kv = kv
        self._cost = cost
        self._order_key = ORDERS[config.order]
        self._order_is_static = config.order in STATIC_ORDERS
        self._waiting: list[
            Sequence
        ] = []  # by queue_key: the order policy's where it is static, else arrival
        self._running: dict[SeqId, Sequence] = {}
        # Names of the blocks that running sequences have yet to compute from what they know, with
        # how many compute them.
        self._coming: dict[bytes, int] = {}
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

    def predict_ttft_ns(self, seq: Sequence) -> Ns:
        """Predicted time until a sequence that arrives now has its first token.

        All prefill that is due before it, and its own, runs in full steps beside the sequences that
        decode; those that wait are taken to find no more in the cache than they find now.
        """
        uncached = (
            len(seq.tokens) - self._kv.match(seq.chain, seq.reusable_tokens) * self._kv.block_size
        )
        due = uncached + sum(len(other.tokens) for other in self._waiting)
        due += sum(
            other.num_remaining for other in self._running.values() if other.num_remaining > 1
        )
        num_decode = sum(other.num_remaining == 1 for other in self._running.values())
        num_kv = sum(len(other.tokens) for other in self._running.values())
        total = 0
        while due > 0:
            num_tokens = min(due, max(1, self._config.step_tokens - num_decode))
            full_steps = max(1, due // num_tokens)
            pairs = num_kv + num_tokens * len(seq.tokens) // 2
            shape = StepShape(
                num_tokens + num_decode, num_decode + 1, num_decode + 1, pairs, num_kv + num_tokens
            )
            total += full_steps * self._cost.step_ns(shape)
            due -= full_steps * num_tokens
        return Ns(total)

    # ---- changes

    def add(self, seq: Sequence, now: Ns) -> None:
        """Let a sequence wait, at the place that its order gives it."""
        seq.queue_key = (
            self._order_key(seq, now, self._kv) if self._order_is_static else (0.0, seq.order)
        )
        insort(self._waiting, seq, key=_queue_key)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out for good. Not while it is part of the running step."""
        if seq.state is State.RUNNING:
            del self._running[seq.seq_id]
            self._forget_coming(seq)
            self._kv.release(seq.seq_id)
        else:
            self._dequeue(seq)
        seq.move(State.FINISHED)

    def advance(self, seq: Sequence, num_tokens: int, sampled: tuple[int, ...]) -> None:
        """A step computed `num_tokens` more of the sequence and chose `sampled` after them."""
        size = self._kv.block_size
        first = seq.num_computed // size
        seq.num_computed += num_tokens
        for token in sampled:
            seq.append(token)
        if seq.num_computed // size > first:
            for name in seq.chain.names[first : seq.num_computed // size]:
                self._drop_coming(name)
            self._kv.commit(seq.seq_id, seq.chain, seq.tokens, seq.num_computed)

    def preempt(self, seq: Sequence, now: Ns, reason: str) -> Preempted:
        """Let the sequence wait again, without its blocks; the full ones stay cached for now."""
        del self._running[seq.seq_id]
        self._forget_coming(seq)
        self._kv.release(seq.seq_id)
        lost = seq.num_computed
        seq.move(State.WAITING)
        seq.num_computed = 0
        seq.in_step = False
        seq.num_preemptions += 1
        seq.queued_ns = now
        self.num_preemptions += 1
        self.num_recomputed_tokens += lost
        self.add(seq, now)
        return Preempted(seq.seq_id, reason, lost)

    def plan(self, now: Ns) -> tuple[StepPlan | None, list[EngineEffect]]:
        """The next step (None: nothing can run), and what happened to sequences on the way."""
        step = _Step(step_budget(self._config, self._cost, self._running.values()))
        self._plan_running(step, now)
        if not step.has_preempted:
            self._plan_waiting(step, now)
        if not step.seqs:
            return None, step.effects
        plan = StepPlan(StepId(self._next_step_id), tuple(step.seqs.values()), tuple(step.copies))
        self._next_step_id += 1
        return plan, step.effects

    # ---- running sequences

    def _plan_running(self, step: "_Step", now: Ns) -> None:
        # No more sequences run than the budget has tokens: admission takes one at least for each.
        for seq in sorted(
            self._running.values(), key=lambda seq: (seq.num_remaining > 1, seq.queue_key)
        ):
            if step.budget <= 0:
                break
            if seq.state is not State.RUNNING:  # a victim of this very loop
                continue
            num_tokens = self._chunk(seq, step.budget)
            if self._make_room(seq, seq.num_computed + num_tokens, step, now):
                self._schedule(seq, num_tokens, step)

    def _make_room(self, seq: Sequence, num_tokens: int, step: "_Step", now: Ns) -> bool:
        """Let the sequence grow at the cost of others; False = it had to be preempted itself."""
        while not self._grow(seq, num_tokens, step):
            victim = choose_victim(self._candidates_for(seq, step), self._last_victim) or seq
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

    def _candidates_for(self, seq: Sequence, step: "_Step") -> Iterator[Sequence]:
        """Who may be preempted for `seq`: its like where this step has not placed them, and those
        of lower priority in any case.
        """
        for other in self._running.values():
            if other is seq or is_protected(self._config, other):
                continue
            is_placed = other.seq_id in step.seqs
            if other.spec.priority > seq.spec.priority or (
                other.spec.priority == seq.spec.priority and not is_placed
            ):
                yield other

    def _grow(self, seq: Sequence, num_tokens: int, step: "_Step") -> bool:
        """Reserve what is not promised to protected sequences, of which this may be one."""
        num_missing = self._kv.blocks_for(num_tokens) - self._kv.num_held(seq.seq_id)
        if num_missing <= 0:
            return True
        if is_protected(self._config, seq):
            if not self._kv.reserve(seq.seq_id, num_tokens):
                raise InvariantError(
                    "promised blocks are gone", seq_id=seq.seq_id, num_missing=num_missing
                )
            step.num_kept = None
            return True
        if step.num_kept is None:
            step.num_kept = sum(
                self._num_promised(other)
                for other in self._running.values()
                if is_protected(self._config, other)
            )
        has_room = num_missing <= self._kv.num_available - step.num_kept
        return has_room and self._kv.reserve(seq.seq_id, num_tokens)

    # ---- waiting sequences

    def _plan_waiting(self, step: "_Step", now: Ns) -> None:
        """Admit in order; what does not fit is overtaken, within a window and an age limit."""
        if not self._waiting:
            return
        num_passed = 0
        num_reserved = self._num_reserved()
        for seq in self._candidates(now):
            if step.budget <= 0 or len(self._running) >= self._config.max_running_seqs:
                break
            # Nobody needs less than one block: the last known token never comes from the cache.
            if (
                num_passed > self._config.skip_ahead_window
                or self._kv.num_available <= num_reserved
            ):
                break
            if self._waits_for_twin(seq):
                num_passed += 1
                continue
            seq.promised_tokens = promised_tokens(self._config, seq)
            num_needed = self._num_needed(seq)
            if num_needed > self._kv.num_available - num_reserved:
                num_passed += 1
                if now - seq.queued_ns >= self._config.skip_ahead_age_ms * NS_PER_MS:
                    break
                continue
            if not self._admit(seq, step):
                break
            num_reserved += self._num_promised(seq)

    def _candidates(self, now: Ns) -> list[Sequence]:
        if self._order_is_static:
            # The loop looks at no more than the window and those it admits.
            limit = self._config.skip_ahead_window + self._config.max_running_seqs + 1
            return self._waiting[:limit]
        oldest = self._waiting[:DYNAMIC_ORDER_WINDOW]
        return sorted(oldest, key=lambda seq: self._order_key(seq, now, self._kv))

    def _dequeue(self, seq: Sequence) -> None:
        del self._waiting[bisect_left(self._waiting, seq.queue_key, key=_queue_key)]

    def _admit(self, seq: Sequence, step: "_Step") -> bool:
        hit = self._kv.admit(seq.seq_id, seq.chain, seq.tokens, seq.reusable_tokens)
        num_tokens = min(self._chunk_limit(), step.budget, len(seq.tokens) - hit.num_tokens)
        if not self._kv.reserve(seq.seq_id, hit.num_tokens + num_tokens):
            self._kv.release(seq.seq_id)
            return False
        self._dequeue(seq)
        seq.move(State.RUNNING)
        seq.num_computed = hit.num_tokens
        self._running[seq.seq_id] = seq
        self._add_coming(seq)
        if seq.first_num_cached is None:
            seq.first_num_cached = hit.num_tokens
            self.num_queried_tokens += len(seq.tokens)
            self.num_hit_tokens += hit.num_tokens
        if hit.copy is not None:
            step.copies.append(hit.copy)
        step.effects.append(Admitted(seq.seq_id, hit.num_tokens))
        self._schedule(seq, num_tokens, step)
        return True

    def _num_needed(self, seq: Sequence) -> int:
        """Blocks that its promise takes out of what is available, now or later."""
        known = self._kv.match(seq.chain, seq.reusable_tokens)
        unheld = self._kv.num_matched_unheld(seq.chain, seq.reusable_tokens)
        return self._kv.blocks_for(seq.promised_tokens) - known + unheld

    def _num_promised(self, seq: Sequence) -> int:
        return max(0, self._kv.blocks_for(seq.promised_tokens) - self._kv.num_held(seq.seq_id))

    def _num_reserved(self) -> int:
        """Blocks that running sequences were promised and do not hold yet."""
        return sum(self._num_promised(seq) for seq in self._running.values())

    # ---- twins: a prefix that is being computed is worth waiting for

    def _waits_for_twin(self, seq: Sequence) -> bool:
        if not (self._coming and self._kv.prefix_cache):
            return False
        names = seq.chain.names[: seq.reusable_tokens // self._kv.block_size]
        first = self._kv.match(seq.chain, seq.reusable_tokens)
        last = min(len(names), first + MIN_TWIN_BLOCKS)
        return last - first == MIN_TWIN_BLOCKS and all(
            name in self._coming for name in names[first:last]
        )

    def _add_coming(self, seq: Sequence) -> None:
        for name in seq.chain.names[seq.num_computed // self._kv.block_size :]:
            self._coming[name] = self._coming.get(name, 0) + 1

    def _forget_coming(self, seq: Sequence) -> None:
        for name in seq.chain.names[seq.num_computed // self._kv.block_size :]:
            self._drop_coming(name)

    def _drop_coming(self, name: bytes) -> None:
        count = self._coming.get(name, 0)
        if count > 1:
            self._coming[name] = count - 1
        elif count:
            del self._coming[name]

    # ---- one sequence's share

    def _chunk_limit(self) -> int:
        return self._config.chunk_tokens or self._config.step_tokens

    def _chunk(self, seq: Sequence, budget: int) -> int:
        return min(seq.num_remaining, self._chunk_limit(), budget)

    def _schedule(self, seq: Sequence, num_tokens: int, step: "_Step") -> None:
        start, end = seq.num_computed, seq.num_computed + num_tokens
        params = seq.spec.params
        is_prompt = end < seq.num_prompt
        step.seqs[seq.seq_id] = SeqStep(
            seq_id=seq.seq_id,
            start=start,
            tokens=tuple(seq.tokens[start:end]),
            block_ids=self._kv.block_ids(seq.seq_id),
            sample=_sample_spec(seq) if end == len(seq.tokens) else None,
            prompt_logprobs=params.prompt_logprobs if seq.wants_scores else None,
            next_prompt_token=seq.tokens[end] if is_prompt else None,
        )
        step.budget -= num_tokens
        seq.in_step = True


class _Step:
    """A step in the making."""

    __slots__ = ("budget", "copies", "effects", "has_preempted", "num_kept", "seqs")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.seqs: dict[SeqId, SeqStep] = {}
        self.copies: list[BlockCopy] = []
        self.effects: list[EngineEffect] = []
        self.has_preempted = False
        # Blocks promised to protected sequences; None = to be counted anew.
        self.num_kept: int | None = None

    def give_back(self, seq_id: SeqId) -> None:
        """Take a sequence's share out again, if it has one."""
        share = self.seqs.pop(seq_id, None)
        if share is not None:
            self.budget += len(share.tokens)


def _queue_key(seq: Sequence) -> tuple[float, int]:
    return seq.queue_key


def _sample_spec(seq: Sequence) -> SampleSpec:
    spec, params = seq.spec, seq.spec.params
    banned: tuple[int, ...] = ()
    if seq.num_output < params.min_tokens:
        banned = (
            params.stop_token_ids
            if params.ignore_eos
            else params.stop_token_ids + spec.eos_token_ids
        )
    if not params.needs_history:
        return SampleSpec(params, len(seq.tokens), banned)
    output = tuple(seq.tokens[seq.num_prompt :])
    return SampleSpec(params, len(seq.tokens), banned, spec.prompt_tokens, output)
