"""A sequence's share of a step, as the executor needs it."""

from headrace.core.base.plan import SampleSpec, SeqStep
from headrace.core.base.types import BlockId
from headrace.core.scheduler.sequence import Sequence


def share_of(seq: Sequence, num_tokens: int, block_ids: tuple[BlockId, ...]) -> SeqStep:
    """The next `num_tokens` known tokens; the last one known is sampled after."""
    start, end = seq.num_computed, seq.num_computed + num_tokens
    params = seq.spec.params
    return SeqStep(
        seq_id=seq.seq_id,
        start=start,
        tokens=tuple(seq.tokens[start:end]),
        block_ids=block_ids,
        sample=_sample_spec(seq) if end == len(seq.tokens) else None,
        prompt_logprobs=params.prompt_logprobs if seq.wants_scores else None,
        next_prompt_token=seq.tokens[end] if end < seq.num_prompt else None,
    )


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
