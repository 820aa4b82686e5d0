"""Sequences that decode until their length is reached, whatever is sampled: all that a glide can
take along.

Decides which sequences are such; refuses to know what is done with them.
"""

from operator import attrgetter

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


def is_decode(step: _Running, num_seqs: int) -> bool:
    """Whether a step computes one token of each of so many sequences, and of nobody else."""
    plan = step.plan
    return (
        len(plan.seqs) == plan.num_tokens == num_seqs
        and not plan.copies
        and all(member.seq.epoch == member.epoch for member in step.living)
    )


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
