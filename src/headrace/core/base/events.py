"""What can happen to an EngineCore, and what it can ask for. These are also the event log and the
wire.
"""

from typing import Final, TypeAlias

import msgspec

from headrace.core.base.plan import StepPlan, StepResult, TokenLogprob
from headrace.core.base.request import FinishReason, SeqSpec
from headrace.core.base.types import BlockId, Ns, SeqId, StepId

TIERS: Final = "tiers"
"""The place of what a worker's own lower tiers hold, as a sequence's `kv_source`."""

# ---- events


class Arrive(msgspec.Struct, frozen=True, tag=True):
    seqs: tuple[SeqSpec, ...]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End a sequence from outside. Idempotent in every state, unknown ids included.

    `reason` is STOP where whoever reads the text found its end, a stop string for instance.
    """

    seq_id: SeqId
    reason: FinishReason = FinishReason.CANCELLED


class StepDone(msgspec.Struct, frozen=True, tag=True):
    result: StepResult


class StepFailed(msgspec.Struct, frozen=True, tag=True):
    step_id: StepId
    error: str


class CopyDone(msgspec.Struct, frozen=True, tag=True):
    """A copy is over: the first `num_blocks` of its blocks have arrived, and are what their names
    say.
    """

    copy_id: int
    num_blocks: int
    error: str = ""  # why it is not all of them


class EndLease(msgspec.Struct, frozen=True, tag=True):
    """What is held for whoever copies a sequence's blocks, or will bring one that is expected, is
    needed no more. Idempotent.
    """

    seq_id: SeqId


class Expect(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A sequence will come whose prompt another worker computes by now: take blocks for its KV, and
    hold them until it is here, until EndLease, or until nobody has spoken of it for long.
    """

    seq_id: SeqId
    tokens: tuple[int, ...]  # all that it has by now
    source: str  # the place where they are computed
    salt: str = ""
    adapter: str = ""


class Computed(msgspec.Struct, frozen=True, tag=True):
    """KV of the first so many tokens of a sequence that is leased, or expected elsewhere, is there.
    To whoever computes it an effect, to whoever waits for it an event.
    """

    seq_id: SeqId
    num_tokens: int


class Timer(msgspec.Struct, frozen=True, tag=True):
    timer_id: int


EngineEvent: TypeAlias = (
    Arrive | Cancel | StepDone | StepFailed | CopyDone | EndLease | Expect | Computed | Timer
)

# ---- effects


class StartStep(msgspec.Struct, frozen=True, tag=True):
    plan: StepPlan


class StartCopy(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Copy blocks by their names into blocks of this worker. CopyDone is the end of it, always."""

    copy_id: int
    source: str  # the place, as its movers call it
    names: tuple[bytes, ...]
    block_ids: tuple[BlockId, ...]
    seq_id: SeqId | None = None  # the sequence that waits for it, or will
    is_handoff: bool = False  # KV comes from another worker, not from a tier of this one


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """A waiting sequence got its blocks; again after each preemption."""

    seq_id: SeqId
    num_cached_tokens: int


class Emit(msgspec.Struct, frozen=True, tag=True):
    seq_id: SeqId
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[
        TokenLogprob, ...
    ] = ()  # for prompt tokens 1, 2, … in order, over several Emits


class Preempted(msgspec.Struct, frozen=True, tag=True):
    seq_id: SeqId
    reason: str
    num_lost_tokens: int  # computed tokens given up


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The last word on an accepted sequence; its blocks are already free or cached."""

    seq_id: SeqId
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int  # those that it came with included
    num_cached_tokens: int  # prompt tokens whose KV was found at first admission
    num_preemptions: int
    stop_token_id: int | None = None
    error: str = ""


class Reject(msgspec.Struct, frozen=True, tag=True):
    """The only word on a sequence that was not accepted."""

    seq_id: SeqId
    status_hint: int
    code: str
    message: str
    hint: str = ""
    retry_after_s: float | None = None


class CallAt(msgspec.Struct, frozen=True, tag=True):
    at_ns: Ns
    timer_id: int


class BlocksStored(msgspec.Struct, frozen=True, tag=True):
    """A run of blocks of one chain: the first is behind `parent`, each other behind the one before
    it.
    """

    names: tuple[bytes, ...]
    parent: bytes
    block_ids: tuple[BlockId, ...]


class BlocksRemoved(msgspec.Struct, frozen=True, tag=True):
    names: tuple[bytes, ...]


KvChange: TypeAlias = BlocksStored | BlocksRemoved


class KvChanged(msgspec.Struct, frozen=True, tag=True):
    changes: tuple[KvChange, ...]


EngineEffect: TypeAlias = (
    StartStep
    | StartCopy
    | Admitted
    | Computed
    | Emit
    | Preempted
    | Finish
    | Reject
    | CallAt
    | KvChanged
)
