"""Sequences that decode until their length is reached, whatever is sampled: all that a glide can
take along.

Decides which sequences are such; refuses to know what is done with them.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from headrace.core.base.plan import SeqStep
from headrace.core.base.request import SeqSpec
from headrace.core.engine.core import EngineCore, _Running
from headrace.core.scheduler.policies import is_protected
from headrace.core.scheduler.sequence import Sequence as Seq


class Decoding:
    """A sequence that decodes. All that it has follows from which step is done."""

    __slots__ = ("end", "key", "length", "seq", "seq_id", "since", "told")

    def __init__(self, seq: Seq, since: int) -> None:
        """It has a token of each step after `since`."""
        self.seq = seq
        self.seq_id = seq.seq_id
        self.key = seq.queue_key
        self.since = since
        self.length = len(seq.tokens) - since  # what it has is that many more than steps are done
        self.end = seq.max_len - self.length  # with this step it has its last token
        self.told = since  # up to which step others were told of its tokens; their own matter


by_key = attrgetter("key")


class Parts(NamedTuple):
    """Who runs when a glide begins."""

    decoding: list[Seq]
    computing: list[Seq]  # their prompts
    shares: tuple[SeqStep, ...]  # what the step that runs has of these


def is_decode(step: _Running, num_seqs: int) -> bool:
    """Whether a step computes one token of each of so many sequences, and of nobody else."""
    plan = step.plan
    return (
        len(plan.seqs) == plan.num_tokens == num_seqs
        and not plan.copies
        and all(member.seq.epoch == member.epoch for member in step.living)
    )


def is_usual(core: EngineCore) -> bool:
    """Whether the engine runs as it runs most of the time, and nobody is about to come or go."""
    steps, overlap = core._steps, core.config.scheduler.overlap
    if not steps or core._loading or core._is_recovering or core._copies:
        return False
    if overlap != "auto" and (overlap == "on") != (len(steps) > 1):
        return False
    return core._scheduler.learns_from_decoding


def find_parts(core: EngineCore) -> Parts | None:
    """None where not everybody who runs, or waits, can be taken along."""
    scheduler, steps = core._scheduler, core._steps
    decoding, shares = list[Seq](), list[SeqStep]()
    for share, (seq, epoch) in zip(steps[0].plan.seqs, steps[0].living, strict=True):
        if seq.epoch != epoch:
            return None
        if len(share.tokens) > 1:
            shares.append(share)
        elif is_plain(core, seq):
            decoding.append(seq)
        else:
            return None
    if len(decoding) == scheduler.num_running and not scheduler.num_waiting:
        # A step that is planned ahead leaves out whoever will have all its tokens by then.
        num_ahead = sum(seq.max_len - len(seq.tokens) > 1 for seq in decoding)
        is_alike = len(steps) == 1 or is_decode(steps[1], num_ahead)
        return Parts(decoding, [], ()) if is_alike else None
    known = {seq.seq_id for seq in decoding}
    computing = [seq for seq in scheduler.running() if seq.seq_id not in known]
    specs = [seq.spec for seq in (*computing, *scheduler.waiting())]
    if len(steps) > 1 or not takes_prompts(core, specs):
        return None
    in_step = {share.seq_id for share in shares}
    for seq in computing:
        if seq.ending or is_protected(core.config.scheduler, seq):
            return None
        if seq.seq_id not in in_step and seq.num_remaining <= 1:
            return None
    return Parts(decoding, computing, tuple(shares))


def takes_prompts(core: EngineCore, specs: Sequence[SeqSpec]) -> bool:
    """Whether prompts of these may be computed beside those who glide."""
    config = core.config.scheduler
    if core._handoff._loads or config.early_reject or config.overlap == "on":
        return False
    return all(will_be_plain(spec) for spec in specs)


def is_plain(core: EngineCore, seq: Seq) -> bool:
    """Whether it goes on until its length is reached, whatever is sampled."""
    spec = seq.spec
    return (
        seq.ending is None
        and not spec.is_leased
        and seq.max_len <= core.spec.max_model_len
        and len(seq.tokens) == seq.num_computed + 1
        and seq.num_output >= spec.params.min_tokens
        and seq.num_output > len(spec.output_tokens)  # its first token here is an event of its own
        and not (_is_looked_at(spec) or seq.wants_scores)
        and not is_protected(core.config.scheduler, seq)
        and core._kv.num_held(seq.seq_id) == core._kv.blocks_for(seq.num_planned)
    )


def will_be_plain(spec: SeqSpec) -> bool:
    """The same of a sequence that comes, once it has its first token."""
    params = spec.params
    return not (
        _is_looked_at(spec)
        or params.prompt_logprobs is not None
        or params.min_tokens > 1
        or spec.is_leased
        or spec.kv_source
    )


def _is_looked_at(spec: SeqSpec) -> bool:
    """Whether it matters which tokens it has."""
    params = spec.params
    can_stop = params.stop_token_ids or (spec.eos_token_ids and not params.ignore_eos)
    return bool(can_stop) or params.needs_history or params.logprobs is not None
