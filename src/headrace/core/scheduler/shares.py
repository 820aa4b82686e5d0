"""A sequence's share of a step, as the executor needs it."""

from headrace.core.base.plan import PENDING, SampleSpec, SeqStep
from headrace.core.base.types import BlockId
from headrace.core.scheduler.sequence import Sequence


def share_of(seq: Sequence, num_tokens: int, block_ids: tuple[BlockId, ...]) -> SeqStep:
    """The next `num_tokens` tokens; behind the last one there is, one is sampled."""
    start, end, length = seq.num_planned, seq.num_planned + num_tokens, seq.length
    tokens = tuple(seq.tokens[start:end])
    if end > len(seq.tokens):
        tokens += (PENDING,)
    params = seq.spec.params
    wants_scores = (
        params.prompt_logprobs is not None and seq.wants_scores and start < seq.num_prompt - 1
    )
    return SeqStep(
        seq_id=seq.seq_id,
        start=start,
        tokens=tokens,
        block_ids=block_ids,
        sample=_sample_spec(seq, length) if end == length else None,
        prompt_logprobs=params.prompt_logprobs if wants_scores else None,
        next_prompt_token=seq.tokens[end] if end < seq.num_prompt else None,
    )


def _sample_spec(seq: Sequence, length: int) -> SampleSpec:
    spec, params = seq.spec, seq.spec.params
    banned: tuple[int, ...] = ()
    if length - seq.num_prompt < params.min_tokens:
        banned = (
            params.stop_token_ids
            if params.ignore_eos
            else params.stop_token_ids + spec.eos_token_ids
        )
    if not params.needs_history:
        return SampleSpec(params, length, banned)
    output = tuple(seq.tokens[seq.num_prompt :]) + (PENDING,) * seq.num_pending
    return SampleSpec(params, length, banned, spec.prompt_tokens, output)
