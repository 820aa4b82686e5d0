"""Many steps of an EngineCore at once, while everybody decodes and nobody waits.

Between such steps nothing is decided but which block comes next: a sequence needs one every so many
tokens, another of its blocks becomes full, and some day it has all its tokens. A glide does these
when they are due, and all else when it ends; then the engine is where stepping one by one would
have brought it, block for block. For whoever knows how long steps take and what they sample
beforehand: a simulation.

It is the engine's own matter, so it knows what is inside.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final

from headrace.core.base.events import BlockRemoved, BlockStored, EngineEffect
from headrace.core.base.plan import PENDING, SeqStep, StepPlan
from headrace.core.base.request import FinishReason
from headrace.core.base.types import Ns, SeqId, StepId
from headrace.core.cost.model import StepShape
from headrace.core.engine.core import OVERLAP_BELOW_NS, EngineCore, _Running
from headrace.core.kv.manager import KvManager
from headrace.core.scheduler.policies import is_protected
from headrace.core.scheduler.sequence import Sequence as Seq

MIN_STEPS: Final = 4  # fewer are not worth it
Tokens = Callable[[SeqId, int, int], Sequence[int]]
"""The tokens that a sequence will have at the positions from the second argument to the third."""
Changes = tuple[BlockStored | BlockRemoved, ...]


class Glide:
    """Steps count from 1, which is the one that runs when the glide begins."""

    def __init__(
        self, core: EngineCore, seqs: list[Seq], ends: list[int], num_steps: int, tokens: Tokens
    ) -> None:
        self.seqs = seqs  # in the order of plans, those that end on the way included
        self.ends = ends  # with which step each of them has its last token
        self.num_steps = num_steps  # that may be done within it; more may not be alike
        self._core = core
        self._tokens = tokens
        self.block_size = size = core.spec.block_size
        self._is_ahead = len(core._steps) > 1
        self._first_id = core._steps[0].plan.step_id
        self._samples = [share.sample for share in core._steps[0].plan.seqs]
        self._lengths = [len(seq.tokens) for seq in seqs]
        # Tokens that were computed, or being computed, when it began.
        self._planned = [seq.num_planned for seq in seqs]
        # Steps between two ends are of the same sequences: the last one of them, how many
        # sequences, and how many tokens these had computed when the glide began.
        self._last_steps = sorted(set(ends))
        self._batches = [
            (sum(end >= last for end in ends), self._num_computed(last))
            for last in self._last_steps
        ]
        self._full: dict[int, list[int]] = {}
        self._needs: dict[int, list[int]] = {}
        # By step modulo the block's size: whose block becomes full, and who needs one, when it is
        # done.
        for index, seq in enumerate(seqs):
            self._full.setdefault(-seq.num_computed % size, []).append(index)
            self._needs.setdefault((1 - seq.num_planned) % size, []).append(index)
        # With which steps, modulo the block's size, a block becomes full or is needed.
        self.border_places = self._full.keys() | self._needs.keys()

    @classmethod
    def begin(cls, core: EngineCore, tokens: Tokens) -> "Glide | None":
        """None where the steps to come are not all alike, or too few. Changes nothing."""
        scheduler, steps = core._scheduler, core._steps
        if not steps or scheduler.num_waiting or core._loading or core._is_recovering:
            return None
        if scheduler._twins._coming or not scheduler.learns_from_decoding:
            return None
        overlap = core.config.scheduler.overlap
        if overlap != "auto" and (overlap == "on") != (len(steps) > 1):
            return None
        if not _is_decode(steps[0], scheduler.num_running):
            return None
        seqs = [member.seq for member in steps[0].living]
        limit = core.spec.max_model_len
        ends = [min(seq.max_len, limit) - len(seq.tokens) for seq in seqs]
        num_steps = max(ends) - 2
        if num_steps < MIN_STEPS or not all(_is_plain(core, seq) for seq in seqs):
            return None
        # A step that is planned ahead leaves out whoever will have all its tokens by then.
        if len(steps) > 1 and not _is_decode(steps[1], sum(end > 1 for end in ends)):
            return None
        for seq, end in zip(seqs, ends, strict=True):
            if seq.spec.is_leased or seq.max_len > limit:
                num_steps = min(num_steps, end - 2)
        return cls(core, seqs, ends, num_steps, tokens) if num_steps >= MIN_STEPS else None

    # ---- queries

    @property
    def kv(self) -> KvManager:
        return self._core._kv

    @property
    def num_running(self) -> int:
        return self._core._scheduler.num_running

    def tokens(self, index: int, begin: int, end: int) -> tuple[int, ...]:
        """What a sequence samples in the steps after `begin`, up to `end`."""
        length = self._lengths[index]
        return tuple(self._tokens(self.seqs[index].seq_id, length + begin, length + end))

    def shape(self, step: int) -> StepShape:
        n, num_kv = self._batches[bisect_left(self._last_steps, step)]
        num_kv += n * step
        return StepShape(n, n, n, num_kv, num_kv)

    def num_done_tokens(self, num_steps: int) -> int:
        """Computed with the first steps."""
        return sum([min(num_steps, end) for end in self.ends])

    def num_planned_tokens(self, num_steps: int) -> int:
        """Of sequences that run, computed or being computed when so many steps are done."""
        return sum(
            [
                min(planned + num_steps, length + end - 1)
                for planned, length, end in zip(
                    self._planned, self._lengths, self.ends, strict=True
                )
                if end > num_steps
            ]
        )

    def outline(self, step: int) -> StepPlan:
        """A step's plan, but for which tokens and blocks they are."""
        return StepPlan(
            StepId(self._first_id + step - 1),
            tuple(
                SeqStep(seq.seq_id, length + step - 2, (PENDING,), (), sample)
                for seq, length, end, sample in zip(
                    self.seqs, self._lengths, self.ends, self._samples, strict=True
                )
                if end >= step
            ),
        )

    def is_alike(self, elapsed_ns: Ns) -> bool:
        """Whether a step that takes so long leaves it as it is whether steps are planned ahead."""
        if self._core.config.scheduler.overlap != "auto":
            return True
        return (0 < elapsed_ns < OVERLAP_BELOW_NS) == self._is_ahead

    def has_room(self, step: int) -> bool:
        """Whether everybody who needs a block then gets one at nobody's cost."""
        needs = self._needs.get(step % self.block_size, ())
        return len(needs) <= self._core._kv.num_available

    # ---- changes

    def pass_border(self, step: int) -> tuple[Changes, dict[int, EngineEffect]]:
        """What the end of the step does to blocks, in the engine's order, and the last words on
        those who have all their tokens, by their places among `seqs`.
        """
        kv, place, ends = self._core._kv, step % self.block_size, self.ends
        full = [index for index in self._full.get(place, ()) if ends[index] >= step]
        last_words: dict[int, EngineEffect] = {}
        if step in ends:
            ended = [index for index, end in enumerate(ends) if end == step]
            for index in sorted({*full, *ended}):
                if index in full:
                    self._commit(index, step)
                if ends[index] == step:
                    last_words[index] = self._finish(index)
        else:
            for index in full:
                self._commit(index, step)
        planned = step + 1 + self._is_ahead
        for index in self._needs.get(place, ()):
            if ends[index] >= planned:
                seq_id = self.seqs[index].seq_id
                kv.reserve(seq_id, (kv.num_held(seq_id) + 1) * self.block_size)
        return kv.drain_changes(), last_words

    def land(self, ends_ns: Sequence[Ns], elapsed_ns: Sequence[Ns]) -> list[StepPlan]:
        """Bring the engine to the end of the last of these steps (at least one, borders passed).

        Returns the plans that run then: the next step's, and one made ahead.
        """
        core, scheduler, num_steps = self._core, self._core._scheduler, len(ends_ns)
        for step in scheduler.learned_among(StepId(self._first_id), num_steps):
            scheduler.learn_decoding(self.shape(step + 1), elapsed_ns[step])
        for index, seq in enumerate(self.seqs):
            if self.ends[index] > num_steps:
                self._fill(index, num_steps)
                seq.num_planned = seq.num_computed
                seq.num_in_flight = seq.num_pending = 0
                seq.num_failures = 0
        core._steps.clear()
        core._num_steps += num_steps
        core._num_computed_tokens += self.num_done_tokens(num_steps)
        core._last_elapsed_ns = elapsed_ns[num_steps - 1]
        core._now = ends_ns[-1]
        scheduler._next_step_id = self._first_id + num_steps
        nothing: list[EngineEffect] = []
        core._start_step(core._now, nothing)
        if self._is_ahead:
            core._start_step(core._now, nothing, is_ahead=True)
        return [running.plan for running in core._steps]

    def _num_computed(self, step: int) -> int:
        """Tokens that the step's sequences had computed when the glide began."""
        pairs = zip(self._lengths, self.ends, strict=True)
        return sum([length - 1 for length, end in pairs if end >= step])

    def _commit(self, index: int, step: int) -> None:
        """What the step samples belongs to no full block, and it may yet be the last to land."""
        seq = self.seqs[index]
        self._fill(index, step - 1)
        self._core._kv.commit(seq.seq_id, seq.chain, seq.tokens, seq.num_computed + 1)

    def _finish(self, index: int) -> EngineEffect:
        effects: list[EngineEffect] = []
        self._fill(index, self.ends[index])
        self._core._finish(self.seqs[index], FinishReason.LENGTH, effects)
        return effects[0]

    def _fill(self, index: int, step: int) -> None:
        """What a sequence has when the step is done."""
        seq = self.seqs[index]
        length = self._lengths[index] + step
        start = len(seq.tokens)
        if start < length:
            seq.tokens += self._tokens(seq.seq_id, start, length)
            seq.chain.extend(seq.tokens)
        seq.num_computed = length - 1


def _is_decode(step: _Running, num_seqs: int) -> bool:
    """Whether a step computes one token of each of so many sequences, and of nobody else."""
    plan = step.plan
    return (
        len(plan.seqs) == plan.num_tokens == num_seqs
        and not plan.copies
        and all(member.seq.epoch == member.epoch for member in step.living)
    )


def _is_plain(core: EngineCore, seq: Seq) -> bool:
    """Whether it goes on until its length is reached, whatever is sampled."""
    spec, params = seq.spec, seq.spec.params
    can_stop = params.stop_token_ids or (spec.eos_token_ids and not params.ignore_eos)
    is_asked_more = params.needs_history or params.logprobs is not None
    return (
        seq.ending is None
        and len(seq.tokens) == seq.num_computed + 1
        and seq.num_output >= params.min_tokens
        and seq.num_output > len(spec.output_tokens)  # its first token here is an event of its own
        and not (can_stop or is_asked_more or seq.wants_scores)
        and not is_protected(core.config.scheduler, seq)
        and core._kv.num_held(seq.seq_id) == core._kv.blocks_for(seq.num_planned)
    )
