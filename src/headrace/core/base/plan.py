"""A step as data: what the scheduler asks of an executor, and what comes back.

A step is one forward pass over a ragged batch. An executor keeps no sequence state besides the KV
blocks: all that a step needs is in its plan, so a sequence can move to another worker with its
tokens alone.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import BlockId, Ns, SeqId, StepId

PENDING: Final = -1
"""In a plan made ahead, the token that the step before samples for the same sequence."""


class SampleSpec(msgspec.Struct, frozen=True):
    """Ask for one token after the last token of a chunk."""

    params: SamplingParams
    position: int  # index of the token to be chosen in prompt + output; the generator's counter
    banned: tuple[int, ...] = ()  # token ids that may not be chosen (end of text before min_tokens)
    prompt_tokens: tuple[int, ...] = ()  # only when params.needs_history
    output_tokens: tuple[int, ...] = ()  # only when params.needs_history


class SeqStep(msgspec.Struct, frozen=True):
    """One sequence's share of a step: compute `tokens` at positions start, start + 1, …"""

    seq_id: SeqId
    start: int  # tokens computed before this step
    tokens: tuple[int, ...]
    block_ids: tuple[BlockId, ...]  # covers positions [0, start + len(tokens))
    sample: SampleSpec | None = None  # None while known tokens remain to be computed
    prompt_logprobs: int | None = None  # number of alternatives for each next prompt token
    next_prompt_token: int | None = None  # the token after the chunk, where it still is prompt


class BlockCopy(msgspec.Struct, frozen=True):
    """Copy the KV of the first `num_tokens` tokens of block `src` into block `dst`, all layers."""

    src: BlockId
    dst: BlockId
    num_tokens: int


class StepPlan(msgspec.Struct, frozen=True):
    """Copies first, then one forward pass over all sequences.

    A plan that `is_ahead` was made while the step before it ran, and may hold PENDING tokens.
    """

    step_id: StepId
    seqs: tuple[SeqStep, ...]
    copies: tuple[BlockCopy, ...] = ()
    is_ahead: bool = False

    @property
    def num_tokens(self) -> int:
        return sum([len(seq.tokens) for seq in self.seqs])


def settled(plan: StepPlan, sampled: Mapping[SeqId, int]) -> StepPlan:
    """The plan with the tokens that the step before has sampled in the place of PENDING."""
    if not plan.is_ahead:
        return plan
    seqs = tuple(_settled(seq, sampled) for seq in plan.seqs)
    return msgspec.structs.replace(plan, seqs=seqs, is_ahead=False)


def _settled(seq: SeqStep, sampled: Mapping[SeqId, int]) -> SeqStep:
    sample = seq.sample
    if sample is not None and sample.output_tokens and sample.output_tokens[-1] == PENDING:
        history = (*sample.output_tokens[:-1], sampled[seq.seq_id])
        sample = msgspec.structs.replace(sample, output_tokens=history)
    elif seq.tokens[-1] != PENDING:
        return seq
    tokens = (*seq.tokens[:-1], sampled[seq.seq_id]) if seq.tokens[-1] == PENDING else seq.tokens
    return msgspec.structs.replace(seq, tokens=tokens, sample=sample)


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log probability (natural) of a token under the model's own distribution, before temperature
    and penalties.
    """

    token_id: int
    logprob: float
    rank: int  # 0 = most likely
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


class SeqResult(msgspec.Struct, frozen=True):
    """What a step computed for one sequence."""

    seq_id: SeqId
    tokens: tuple[int, ...] = ()  # empty while known tokens remain to be computed
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each of `tokens`, where asked
    # One for each of the tokens that follow a chunk's positions, as far as they are prompt.
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str = ""  # why it has neither, which is its own affair: the others of the step go on


class StepResult(msgspec.Struct, frozen=True):
    """Results in plan order. `elapsed_ns` is the executor's own time for the step."""

    step_id: StepId
    seqs: tuple[SeqResult, ...]
    elapsed_ns: Ns


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the core must know of an executor."""

    model_digest: str  # hex SHA-256 over what decides the model's output
    kv_dtype: str
    block_size: int
    num_blocks: int
    max_model_len: int  # most tokens (prompt + output) of one sequence
    vocab_size: int
    can_copy_blocks: bool = True
    batch_invariant: bool = True
