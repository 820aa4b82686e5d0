"""What every KV block holds, kept beside the KvManager as an independent witness.

A real executor computes garbage, silently, when a block table points at somebody else's blocks. The
witness knows each sequence's tokens from what clients sent and what was emitted, tags every slot of
every block with the whole prefix it was computed from, and raises when a step would read a slot
that holds anything else.
"""

from headrace.core.base.errors import InvariantError
from headrace.core.base.events import Arrive, EngineEffect, EngineEvent, StartStep, StepDone
from headrace.core.base.plan import SeqStep, StepPlan, WorkerSpec
from headrace.core.base.request import SeqSpec
from headrace.core.base.types import BlockId, SeqId


class _Known:
    """A sequence's tokens, and for each of them the tag of the prefix that ends there, salt and
    adapter included.
    """

    def __init__(self, spec: SeqSpec) -> None:
        self.tokens: list[int] = []
        self.tags: list[int] = []
        self._last = hash((spec.salt.encode(), spec.adapter.encode()))
        for token in spec.prompt_tokens:
            self.append(token)

    def append(self, token: int) -> None:
        self._last = hash((self._last, token))
        self.tokens.append(token)
        self.tags.append(self._last)


class KvShadow:
    """Watches one worker's events and effects."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._block_size = spec.block_size
        self._num_blocks = spec.num_blocks
        self._slots: dict[BlockId, list[int | None]] = {}
        self._known: dict[SeqId, _Known] = {}

    def observe(self, event: EngineEvent, effects: list[EngineEffect]) -> None:
        match event:
            case Arrive(seqs):
                for spec in seqs:
                    self._known[spec.seq_id] = _Known(spec)
            case StepDone(result):
                for seq in result.seqs:
                    for token in seq.tokens:
                        self._known[seq.seq_id].append(token)
        for effect in effects:
            if isinstance(effect, StartStep):
                self._start(effect.plan)

    def _start(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            self._block(copy.dst)[: copy.num_tokens] = self._block(copy.src)[: copy.num_tokens]
        written: set[BlockId] = set()
        for seq in plan.seqs:
            known = self._known[seq.seq_id]
            self._check_share(seq, known)
            written |= self._write(seq, known, written)

    def _check_share(self, seq: SeqStep, known: _Known) -> None:
        size = self._block_size
        end = seq.start + len(seq.tokens)
        if not seq.tokens or seq.tokens != tuple(known.tokens[seq.start : end]):
            raise InvariantError(
                "step computes other tokens than the sequence's", seq_id=seq.seq_id
            )
        if (seq.sample is not None) != (end == len(known.tokens)):
            raise InvariantError("step samples where it must not, or does not", seq_id=seq.seq_id)
        if len(seq.block_ids) * size < end or len(set(seq.block_ids)) != len(seq.block_ids):
            raise InvariantError("block table is too short or repeats a block", seq_id=seq.seq_id)
        for index in range(seq.start):
            if self._block(seq.block_ids[index // size])[index % size] != known.tags[index]:
                raise InvariantError(
                    "step reads KV of another prefix", seq_id=seq.seq_id, position=index
                )

    def _write(self, seq: SeqStep, known: _Known, others: set[BlockId]) -> set[BlockId]:
        size = self._block_size
        end = seq.start + len(seq.tokens)
        own = set(seq.block_ids[seq.start // size : -(-end // size)])
        if own & others:
            raise InvariantError("two sequences write to one block", seq_id=seq.seq_id)
        for index in range(seq.start, end):
            self._block(seq.block_ids[index // size])[index % size] = known.tags[index]
        return own

    def _block(self, block_id: BlockId) -> list[int | None]:
        if not 0 <= block_id < self._num_blocks:
            raise InvariantError("block does not exist", block_id=block_id)
        return self._slots.setdefault(block_id, [None] * self._block_size)
