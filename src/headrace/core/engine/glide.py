"""Many steps of an EngineCore at once, for those that decode, while others may come and have their
prompts computed.

For a sequence that decodes nothing is decided but which block comes next: it needs one every so
many tokens, another of its blocks becomes full, and some day it has all its tokens. A glide does
what is due to blocks in its order, for many steps at once, and all else of it when the glide ends;
then the engine is where stepping one by one would have brought it, block for block. Steps with
which nobody comes or ends are not looked at. What computes prompts is planned by the scheduler
itself, step by step. For whoever knows how long steps take and what they sample beforehand: a
simulation.

It is the engine's own matter, so it knows what is inside.
"""

from bisect import insort
from collections.abc import Sequence
from typing import Final

from headrace.core.base.errors import InvariantError
from headrace.core.base.events import Arrive, EngineEffect, StartStep
from headrace.core.base.plan import SeqResult, StepPlan
from headrace.core.base.request import FinishReason, SeqSpec
from headrace.core.base.types import FOREVER_NS, Ns, StepId
from headrace.core.cost.model import StepShape
from headrace.core.engine.core import OVERLAP_BELOW_NS, EngineCore, _Member, _Running
from headrace.core.engine.passed import Changes, Passed, Prompts, Tokens
from headrace.core.engine.plain import (
    Decoding,
    by_key,
    find_parts,
    is_plain,
    is_usual,
    takes_prompts,
)
from headrace.core.scheduler.room import Company
from headrace.core.scheduler.sequence import Sequence as Seq
from headrace.core.scheduler.sequence import State
from headrace.core.scheduler.shares import share_of
from headrace.core.scheduler.step import StepDraft

MIN_STEPS: Final = 4  # fewer are not worth it


class Glide:
    """Steps count from 1, which is the one that runs when the glide begins."""

    def __init__(self, core: EngineCore, seqs: list[Seq], tokens: Tokens) -> None:
        self._core = core
        self._tokens = tokens
        self.block_size = core.spec.block_size
        self.first_id = core._steps[0].plan.step_id
        self.done = 0  # steps, as far as they were looked at
        self._planned = len(core._steps)  # steps, by then
        self.decoding: list[Decoding] = []  # in the order of plans
        # By step modulo the block's size: whose block becomes full when it is done, so that another
        # one is needed by the step after it.
        self.places: dict[int, list[Decoding]] = {}
        self.ends: dict[int, list[Decoding]] = {}
        self._last_end = 0  # of these
        self._length = 0  # of all that decode, together
        self._computing: list[Seq] = []  # prompts
        self._prompts: dict[int, Prompts] = {}  # of steps that are planned
        for seq in seqs:
            self._join(seq)

    @classmethod
    def begin(cls, core: EngineCore, tokens: Tokens) -> "Glide | None":
        """None where not all that run can be taken along, or too few steps are to come. Changes
        nothing.
        """
        parts = find_parts(core) if is_usual(core) else None
        if parts is None or not parts.decoding:
            return None
        if max(seq.max_len - len(seq.tokens) for seq in parts.decoding) - 2 < MIN_STEPS:
            return None
        glide = cls(core, parts.decoding, tokens)
        glide._computing = parts.computing
        if parts.shares:
            glide._prompts[1] = Prompts(parts.shares, core._steps[0].plan.copies)
        return glide

    # ---- queries

    @property
    def is_ahead(self) -> bool:
        """Whether the step after the one that runs is planned."""
        return self._planned - self.done > 1

    @property
    def is_busy(self) -> bool:
        """Whether every step is to be looked at."""
        return bool(self._core._scheduler.num_waiting or self._computing)

    def last_with_room(self, step: int, last: int) -> int:
        """Of the steps after this one, which is done, up to the last: the first with which blocks
        may run out, or else the last.
        """
        places, size, ahead = self.places, self.block_size, self.is_ahead
        num_left = self._core._kv.num_available
        if len(self.decoding) * (-(-(last - step) // size)) <= num_left:
            return last
        for number in range(step + 1, last):
            num_left -= len(places.get((number + ahead) % size, ()))
            if num_left < 0:
                return number
        return last

    def prompts_of(self, step: int) -> Prompts | None:
        return self._prompts.get(step)

    def tokens(self, one: Decoding, begin: int, end: int) -> tuple[int, ...]:
        """What a sequence samples in the steps after `begin`, up to `end`."""
        return tuple(self._tokens(one.seq_id, one.length + begin, one.length + end))

    def shape(self, step: int) -> StepShape:
        """Of all that decode, in a step before which none of them ends."""
        num_kv = self._length + (n := len(self.decoding)) * (step - 1)
        return StepShape(n, n, n, num_kv, num_kv)

    def whole_shape(self, step: int) -> StepShape:
        """Of all that is in the step, which is the one that runs."""
        shape, prompts = self.shape(step), self._prompts.get(step)
        for share in prompts.shares if prompts is not None else ():
            shape += StepShape.of_share(share)
        return shape

    def num_planned_tokens(self, num_done: int) -> int:
        """Of sequences that run, computed or being computed when so many steps are done."""
        planned = self._planned + num_done - self.done
        return sum(
            [one.length - 1 + min(planned, one.end) for one in self.decoding if one.end > num_done]
        ) + sum([seq.num_planned for seq in self._computing])

    @property
    def alike_ns(self) -> tuple[Ns, Ns]:
        """Steps that take from the first to before the second change nothing in planning ahead."""
        if self._core.config.scheduler.overlap != "auto":
            return Ns(0), Ns(FOREVER_NS)
        return (Ns(1), OVERLAP_BELOW_NS) if self.is_ahead else (OVERLAP_BELOW_NS, Ns(FOREVER_NS))

    def takes_all(self, specs: Sequence[SeqSpec]) -> bool:
        """Whether these may come without the glide's end."""
        return takes_prompts(self._core, specs)

    @property
    def last_step(self) -> int:
        """With which the engine goes on by itself at the latest: the next two are of somebody."""
        return self._last_end - 2

    def can_pass(self, step: int) -> bool:
        """Whether the end of the step costs nobody who runs a block, and some decode on."""
        if step >= self.last_step:
            return False
        core, kv, size, places = self._core, self._core._kv, self.block_size, self.places
        num_left = kv.num_available
        num_left -= len(places.get(step % size, ())) + len(places.get((step + 1) % size, ()))
        for seq in self._computing:
            num_left -= kv.blocks_for(len(seq.tokens) + 1) - kv.num_held(seq.seq_id)
        for seq in core._scheduler.waiting():
            num_left -= kv.blocks_for(len(seq.tokens) + 1)
            if num_left < 0:
                break
        prompts = self._prompts.get(step)
        # The last token of a prompt, alone, is planned as what decodes.
        return num_left >= 0 and not any(
            share.start + len(share.tokens) == len(core._seqs[share.seq_id].tokens) - 1
            for share in (prompts.shares if prompts is not None else ())
        )

    # ---- changes

    def arrive(self, now: Ns, event: Arrive) -> list[EngineEffect]:
        """Sequences that it takes come while a step runs."""
        core = self._core
        core._now = now
        effects: list[EngineEffect] = []
        for spec in event.seqs:
            core._arrive(now, spec, effects)
        return effects

    def pass_to(self, step: int, elapsed_ns: Sequence[Ns]) -> Changes:
        """Steps are done with which nobody begins or ends; these times each of all took. Returns
        what became of blocks.
        """
        core, scheduler, done = self._core, self._core._scheduler, self.done
        num_steps = step - done
        if num_steps <= 0:
            return ()
        for index in scheduler.learned_among(StepId(self.first_id + done), num_steps):
            number = done + index + 1
            step_id = StepId(self.first_id + done + index)
            scheduler.learn_shape(step_id, self.shape(number), elapsed_ns[number - 1])
        core._num_steps += num_steps
        core._num_computed_tokens += num_steps * len(self.decoding)
        core._last_elapsed_ns = elapsed_ns[step - 1]
        places, size, ahead = self.places, self.block_size, self._planned - done
        for number in range(done + 1, step + 1):
            if (place := number % size) in places:
                for one in places[place]:
                    self._commit(one, number)
            if (place := (number + ahead - 1) % size) in places:
                self._take_blocks(places[place], number + ahead)
        self.done = step
        self._planned += num_steps
        return core._kv.drain_changes()

    def pass_step(self, at_ns: Ns, elapsed_ns: Ns) -> Passed:
        """The step that runs is done, and as many are planned as production would plan."""
        core, scheduler, step = self._core, self._core._scheduler, self.done + 1
        shape = self.whole_shape(step)
        core._now, core._last_elapsed_ns = at_ns, elapsed_ns
        scheduler.learn_shape(StepId(self.first_id + step - 1), shape, elapsed_ns)
        core._num_steps += 1
        core._num_computed_tokens += shape.num_tokens
        ended = self._pass_decoding(step)
        effects: list[EngineEffect] = []
        joining = self._pass_prompts(step, effects)
        self.done = step
        joined = [self._join(seq) for seq in joining]
        if self._planned == step:
            self._plan(at_ns, effects)
        is_over = False
        if self._planned == step + 1 and self._plans_ahead(step + 1):
            # Upon tokens of prompts that are not sampled yet only the engine itself can plan.
            is_over = step + 1 in self._prompts
            if is_over:
                self.land()
                core._start_step(at_ns, effects, is_ahead=True)
                effects = [effect for effect in effects if not isinstance(effect, StartStep)]
            else:
                self._plan(at_ns, effects, is_ahead=True)
        return Passed(ended, effects, joined, core._kv.drain_changes(), is_over)

    def land(self) -> list[StepPlan]:
        """Bring the engine to where it is. Returns the plans that run: the next step's, and one
        made ahead.
        """
        core, done = self._core, self.done
        core._scheduler._next_step_id = self.first_id + self._planned
        for one in self.decoding:
            self._fill(one, done)
            one.seq.num_failures = 0
        core._steps.clear()
        for step in range(done + 1, self._planned + 1):
            core._steps.append(self._running(step))
        return [running.plan for running in core._steps]

    # ---- the end of a step

    def _pass_decoding(self, step: int) -> list[tuple[Decoding, EngineEffect]]:
        """What it does to blocks of those that decode, in the engine's order."""
        full, ending = self.places.get(step % self.block_size, ()), self.ends.pop(step, None)
        if ending is None:
            for one in full:
                self._commit(one, step)
            return []
        ended: list[tuple[Decoding, EngineEffect]] = []
        for one in sorted({*full, *ending}, key=by_key):
            if one in full:
                self._commit(one, step)
            if one.end == step:
                ended.append((one, self._finish(one)))
        for one in ending:
            self._leave(one)
        return ended

    def _pass_prompts(self, step: int, effects: list[EngineEffect]) -> list[Seq]:
        """Who has its first token with it."""
        prompts = self._prompts.pop(step, None)
        if prompts is None:
            return []
        core, joining = self._core, list[Seq]()
        for share in prompts.shares:
            seq = core._seqs[share.seq_id]
            sampled: tuple[int, ...] = ()
            if share.sample is not None:
                position = share.sample.position
                sampled = tuple(self._tokens(seq.seq_id, position, position + 1))
            core._apply(seq, share, SeqResult(seq.seq_id, sampled), effects)
            if sampled:
                self._computing.remove(seq)
                if seq.state is State.RUNNING:
                    joining.append(seq)
        return joining

    def _plans_ahead(self, step: int) -> bool:
        """Whether to plan the step after this one, which runs."""
        match self._core.config.scheduler.overlap:
            case "on":
                return True
            case "auto":
                prompts = self._prompts.get(step)
                only_decodes = prompts is None or prompts.only_decodes
                return only_decodes and 0 < self._core._last_elapsed_ns < OVERLAP_BELOW_NS
            case _:
                return False

    def _plan(self, now: Ns, effects: list[EngineEffect], *, is_ahead: bool = False) -> None:
        core, scheduler = self._core, self._core._scheduler
        self._planned = step = self._planned + 1
        self._take_blocks(self.places.get((step - 1) % self.block_size, ()), step)
        if not self.is_busy:
            return
        decoding = [one for one in self.decoding if one.end >= step]
        step_tokens = core.config.scheduler.step_tokens
        draft = StepDraft(step_tokens, is_ahead=is_ahead, num_others=len(decoding))
        scheduler.plan_prompts(self._company(decoding), self._computing, draft, now)
        effects += draft.effects
        if not draft.seqs:
            return
        for share in draft.seqs.values():
            seq = core._seqs[share.seq_id]
            seq.launch(share)
            if seq not in self._computing:
                self._computing.append(seq)
        self._prompts[step] = Prompts(tuple(draft.seqs.values()), tuple(draft.copies))

    def _take_blocks(self, needing: Sequence[Decoding], step: int) -> None:
        """Another one for each of these that is in the step."""
        kv = self._core._kv
        for one in needing:
            if one.end >= step:
                kv.reserve(one.seq_id, (kv.num_held(one.seq_id) + 1) * self.block_size)

    def _company(self, decoding: list[Decoding]) -> Company:
        if not decoding:
            return Company(0, 0, None)
        num_kv = sum([one.length for one in decoding]) + self.done * len(decoding)
        usual = self._core._scheduler.usual_itl_ms
        stated = [one.seq.spec.slo.itl_ms for one in decoding]
        return Company(
            len(decoding), num_kv, min([usual if one is None else one for one in stated])
        )

    # ---- one sequence

    def _join(self, seq: Seq) -> Decoding:
        if not is_plain(self._core, seq):
            raise InvariantError("a glide cannot take a sequence along", seq_id=seq.seq_id)
        one = Decoding(seq, self.done)
        insort(self.decoding, one, key=by_key)
        insort(self.places.setdefault((1 - one.length) % self.block_size, []), one, key=by_key)
        self.ends.setdefault(one.end, []).append(one)
        self._last_end = max(self._last_end, one.end)
        self._length += one.length
        return one

    def _leave(self, one: Decoding) -> None:
        self.decoding.remove(one)
        place = (1 - one.length) % self.block_size
        self.places[place].remove(one)
        if not self.places[place]:
            del self.places[place]
        self._length -= one.length

    def _commit(self, one: Decoding, step: int) -> None:
        """What the step samples belongs to no full block, and it may yet be the last to land."""
        core, seq = self._core, one.seq
        self._fill(one, step - 1)
        num_computed = seq.num_computed + 1
        if core._scheduler._twins._coming:
            index = num_computed // self.block_size - 1
            core._scheduler._twins.arrived(seq.chain.names[index : index + 1])
        core._kv.commit(seq.seq_id, seq.chain, num_computed)

    def _finish(self, one: Decoding) -> EngineEffect:
        effects: list[EngineEffect] = []
        self._fill(one, one.end)
        self._core._finish(one.seq, FinishReason.LENGTH, effects)
        return effects[0]

    def _fill(self, one: Decoding, step: int) -> None:
        """What a sequence has when the step is done. It never seems to want more than one token:
        whoever plans prompts passes it by.
        """
        seq = one.seq
        length = one.length + step
        start = len(seq.tokens)
        if start < length:
            seq.tokens += self._tokens(one.seq_id, start, length)
            seq.chain.extend(seq.tokens)
        seq.num_computed = seq.num_planned = length - 1
        seq.num_in_flight = seq.num_pending = 0

    def _running(self, step: int) -> _Running:
        """A step that is planned, as the engine has it."""
        core = self._core
        shares = []
        for one in self.decoding:
            if one.end >= step:
                shares.append(share_of(one.seq, 1, core._kv.block_ids(one.seq_id)))
                one.seq.launch(shares[-1])
        prompts = self._prompts.get(step, Prompts((), ()))
        shares += prompts.shares
        seqs = [core._seqs[share.seq_id] for share in shares]
        plan = StepPlan(
            StepId(self.first_id + step - 1), tuple(shares), prompts.copies, step > self.done + 1
        )
        return _Running(plan, [_Member(seq, seq.epoch) for seq in seqs])
