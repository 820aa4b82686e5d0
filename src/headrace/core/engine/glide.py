"""Many steps of an EngineCore at once, while everybody decodes and nobody waits.

Between such steps nothing is decided but which block comes next: a sequence needs one every so many
tokens, and another of its blocks becomes full. A glide does these two when they are due, and all
else when it ends; then the engine is where stepping one by one would have brought it, block for
block. For whoever knows how long steps take and what they sample beforehand: a simulation.

It is the engine's own matter, so it knows what is inside.
"""

from collections.abc import Callable, Sequence
from typing import Final

from headrace.core.base.events import BlockRemoved, BlockStored, EngineEffect
from headrace.core.base.plan import StepPlan
from headrace.core.base.types import Ns, SeqId, StepId
from headrace.core.cost.model import StepShape
from headrace.core.engine.core import OVERLAP_BELOW_NS, EngineCore, _Running
from headrace.core.kv.manager import KvManager
from headrace.core.scheduler.policies import is_protected
from headrace.core.scheduler.sequence import Sequence as Seq

MIN_STEPS: Final = 4  # fewer are not worth it
Tokens = Callable[[SeqId, int, int], Sequence[int]]
"""The tokens that a sequence will have at the positions from the second argument to the third."""


class Glide:
    """Steps count from 1, which is the one that runs when the glide begins."""

    def __init__(self, core: EngineCore, seqs: list[Seq], num_steps: int, tokens: Tokens) -> None:
        self.seqs = seqs
        self.num_steps = num_steps  # that may be done within it; more may not be alike
        self._core = core
        self._tokens = tokens
        self.block_size = size = core.spec.block_size
        self._is_ahead = len(core._steps) > 1
        self._first_id = core._steps[0].plan.step_id
        # Tokens that were computed, or being computed, when it began.
        self.num_planned = sum(seq.num_planned for seq in seqs)
        self._num_kv = sum(seq.num_computed for seq in seqs)
        self._lengths = [len(seq.tokens) for seq in seqs]
        # By step modulo the block's size: whose block becomes full, and who needs one, when it is
        # done.
        self._full: dict[int, list[int]] = {}
        self._needs: dict[int, list[Seq]] = {}
        for index, seq in enumerate(seqs):
            self._full.setdefault(-seq.num_computed % size, []).append(index)
            self._needs.setdefault((1 - seq.num_planned) % size, []).append(seq)
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
        if any(not _is_decode_of_all(step, scheduler.num_running) for step in steps):
            return None
        seqs = [member.seq for member in steps[0].living]
        if not all(_is_plain(core, seq) for seq in seqs):
            return None
        limit = core.spec.max_model_len
        # While a step is planned ahead, whoever may end with the one before is left out.
        num_steps = min(min(seq.max_len, limit) - len(seq.tokens) for seq in seqs) - 2
        return cls(core, seqs, num_steps, tokens) if num_steps >= MIN_STEPS else None

    # ---- queries

    @property
    def kv(self) -> KvManager:
        return self._core._kv

    def tokens(self, index: int, begin: int, end: int) -> tuple[int, ...]:
        """What a sequence samples in the steps after `begin`, up to `end`."""
        length = self._lengths[index]
        return tuple(self._tokens(self.seqs[index].seq_id, length + begin, length + end))

    def shape(self, step: int) -> StepShape:
        n = len(self.seqs)
        num_kv = self._num_kv + n * step
        return StepShape(n, n, n, num_kv, num_kv)

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

    def pass_border(self, step: int) -> tuple[BlockStored | BlockRemoved, ...]:
        """What the end of the step does to blocks, in the engine's order."""
        kv, place = self._core._kv, step % self.block_size
        for index in self._full.get(place, ()):
            seq = self.seqs[index]
            # What the step samples belongs to no full block, and it may yet be the last to land.
            self._fill(index, step - 1)
            kv.commit(seq.seq_id, seq.chain, seq.tokens, seq.num_computed + 1)
        for seq in self._needs.get(place, ()):
            kv.reserve(seq.seq_id, (kv.num_held(seq.seq_id) + 1) * self.block_size)
        return kv.drain_changes()

    def land(self, ends_ns: Sequence[Ns], elapsed_ns: Sequence[Ns]) -> list[StepPlan]:
        """Bring the engine to the end of the last of these steps (at least one, borders passed).

        Returns the plans that run then: the next step's, and one made ahead.
        """
        core, scheduler, num_steps = self._core, self._core._scheduler, len(ends_ns)
        for step in scheduler.learned_among(StepId(self._first_id), num_steps):
            scheduler.learn_decoding(self.shape(step + 1), elapsed_ns[step])
        for index, seq in enumerate(self.seqs):
            self._fill(index, num_steps)
            seq.num_planned = seq.num_computed
            seq.num_in_flight = seq.num_pending = 0
            seq.num_failures = 0
        core._steps.clear()
        core._num_steps += num_steps
        core._num_computed_tokens += num_steps * len(self.seqs)
        core._last_elapsed_ns = elapsed_ns[num_steps - 1]
        core._now = ends_ns[-1]
        scheduler._next_step_id = self._first_id + num_steps
        nothing: list[EngineEffect] = []
        core._start_step(core._now, nothing)
        if self._is_ahead:
            core._start_step(core._now, nothing, is_ahead=True)
        return [running.plan for running in core._steps]

    def _fill(self, index: int, step: int) -> None:
        """What a sequence has when the step is done."""
        seq = self.seqs[index]
        length = self._lengths[index] + step
        start = len(seq.tokens)
        if start < length:
            seq.tokens += self._tokens(seq.seq_id, start, length)
            seq.chain.extend(seq.tokens)
        seq.num_computed = length - 1


def _is_decode_of_all(step: _Running, num_running: int) -> bool:
    """Whether a step computes one token of each sequence that runs, and of nobody else."""
    plan = step.plan
    return (
        len(plan.seqs) == plan.num_tokens == num_running
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
