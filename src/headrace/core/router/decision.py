"""A choice of a worker, with its reasons: what is kept and shown of each.

People know workers by their names. An id stands for one life of one, and beside its name.
"""

import msgspec

from headrace.core.base.types import Ns, WorkerId
from headrace.core.base.worker import Role


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A worker that could have taken the request, in predicted milliseconds."""

    worker_id: WorkerId
    name: str
    num_hit_blocks: int  # leading blocks of the request that it has cached
    queue_ms: float  # until the prefill work booked before it is done
    prefill_ms: float  # of the tokens that are not cached
    transfer_ms: float  # of the blocks that it would fetch from another worker
    interference_ms: float  # by the sequences that decode there, over the request's life
    total_ms: float  # what is compared: the five by their weights
    stats_age_ms: float | None  # of what it told about its load; None = it never did
    neighbours_ms: float = 0.0  # by which others' tokens there come later, as far as that counts
    num_fetched_blocks: int = 0
    fetch_from: str | None = None
    fetch_from_id: WorkerId | None = None

    @property
    def num_source_blocks(self) -> int:
        """Leading blocks that the worker has which they would be fetched from."""
        return self.num_hit_blocks + self.num_fetched_blocks

    @property
    def ttft_ms(self) -> float:
        """From now to the first token."""
        return self.queue_ms + self.prefill_ms + self.transfer_ms


class Filtered(msgspec.Struct, frozen=True, gc=False):
    """Workers that could not take it, for one reason."""

    reason: str
    num_workers: int
    workers: tuple[str, ...]  # the first few


class Alternative(msgspec.Struct, frozen=True, gc=False):
    """What would have been chosen otherwise, by the same data."""

    by: str  # kv; no_cache = kv, if nobody had cached anything
    worker: str
    worker_id: WorkerId
    total_ms: float


class Decision(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Why a request went where it went. `candidates` are the chosen one and the next cheapest."""

    request_id: int
    policy: str
    decided_ns: Ns
    waited_ms: float  # in the router
    worker: str
    worker_id: WorkerId
    candidates: tuple[Candidate, ...]  # the chosen one first
    num_candidates: int  # all that could have taken it
    num_tied: int  # as good as the chosen one; the seed picked among them
    filtered: tuple[Filtered, ...]
    alternatives: tuple[Alternative, ...]
    regret_ms: float  # predicted cost beyond the cheapest candidate's
    asks_for: Role = Role.MIXED  # PREFILL = its prompt and first token alone
    is_fallback: bool = False  # every worker was doubtful, so doubts did not count
    ttft_ms: float | None = None  # as it became: from the decision to the first token
    # Where its prompt was computed for this worker, or where it was until it had to go on here.
    before: "Decision | None" = None

    @property
    def chosen(self) -> Candidate:
        return self.candidates[0]

    @property
    def prefill_worker(self) -> str | None:
        """Who was asked for its prompt alone; None = nobody."""
        for one in (self, self.before):
            if one is not None and one.asks_for is Role.PREFILL:
                return one.worker
        return None
