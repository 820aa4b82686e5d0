"""A request as the engine sees it: sequences with their limits, and how they may end."""

from enum import StrEnum
from typing import Final

import msgspec

from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import NS_PER_S, Ns, SeqId

AGING_NS: Final = Ns(10 * NS_PER_S)  # of waiting that make up for one step of priority


class Slo(msgspec.Struct, frozen=True):
    """Limits that a request must meet to count as good. None = not stated."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None


class SeqSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence as it arrives.

    One that began on another worker brings the output that it has: it goes on as if that had been
    made here, with the same generator counter, penalties and limits. So would what is a function of
    the output, as the state of a grammar is: whoever has one feeds it `output_tokens` first.
    """

    seq_id: SeqId  # unique for the life of the worker
    request_id: str
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...] = ()  # made elsewhere; fewer than params.max_tokens
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    kv_source: str = ""  # place that may have the KV of its tokens; empty = none
    num_source_blocks: int | None = None  # leading ones that it has, as far as is known; None = all
    is_leased: bool = False  # its blocks are held for another worker when it has ended
    salt: str = ""  # keeps tenants' cached blocks apart
    adapter: str = ""
    session: str = ""  # of which it is a part, for a router; empty = none, and at every worker
    tenant: str = ""  # whose turn it takes in a router's queue; likewise
    priority: int = 0  # lower runs earlier
    slo: Slo = Slo()
    deadline_ns: Ns | None = None
    arrived_ns: Ns = Ns(0)  # at the server; before the engine saw it


class FinishReason(StrEnum):
    STOP = "stop"  # end of text or a stop token id
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"
