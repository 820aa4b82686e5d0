"""What can happen to a RouterCore, and what it can ask for.

A request is the router's unit: its choices share a prompt, so they run on one worker.
"""

from typing import TypeAlias

import msgspec

from headrace.core.base.events import CallAt, KvChange, Timer
from headrace.core.base.plan import WorkerSpec
from headrace.core.base.request import Slo
from headrace.core.base.types import Ns, WorkerId
from headrace.core.base.worker import Role
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.engine.stats import EngineStats
from headrace.core.router.decision import Decision


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """All that a choice among workers depends on; the text stays with the front end."""

    request_id: int
    block_names: tuple[bytes, ...]  # of the full blocks of the known tokens, in order
    # False = no worker publishes blocks under such names: the router guesses who has them.
    are_names_published: bool = True
    num_tokens: int  # known: the prompt, and after a migration what was emitted since
    num_choices: int = 1
    max_tokens: int = 128  # of each choice, still to come
    priority: int = 0  # lower goes first
    slo: Slo = Slo()
    session: str = ""
    tenant: str = ""
    adapter: str = ""
    arrived_ns: Ns = Ns(0)  # at the server
    deadline_ns: Ns | None = None
    excluded: tuple[WorkerId, ...] = ()  # workers it died on
    is_migration: bool = False  # it ran already: goes first, and is not refused for being late
    is_coming: bool = False  # its prompt is computed elsewhere, and its KV comes from there
    prompt_id: int = -1  # then, the number under which the router knows that
    # What the delay of each sequence that decodes beside its prompt counts, beside one of its own.
    neighbour_weight: float = 0.0
    model_digest: str = ""  # as in WorkerSpec; empty = any
    role: Role = Role.MIXED  # what is asked for: PREFILL or DECODE for one part of the work


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker tells about itself, all requests of all front ends together.

    A figure that is not a number, or negative, makes the whole unknown. None = the worker does not
    tell this one: the router's own bookings stand.
    """

    num_running: int | float
    num_waiting: int | float
    # Known tokens yet to be computed, running ones included.
    num_queued_prefill_tokens: int | float | None
    num_kv_tokens: int | float | None  # held by running sequences
    num_free_blocks: int | float | None
    num_cached_blocks: int | float  # held by nobody, kept for reuse
    num_pinned_blocks: int | float
    # Of a step full of prompts, as far as its own steps have shown.
    full_step_ns: int | float | None = None

    @classmethod
    def of(cls, stats: EngineStats, full_step_ns: int | None = None) -> "WorkerLoad":
        """What a router wants to know of a worker's state, and of its steps where it says that."""
        return cls(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_queued_prefill_tokens=stats.num_prefill_tokens,
            num_kv_tokens=stats.num_kv_tokens,
            num_free_blocks=stats.num_free_blocks,
            num_cached_blocks=stats.num_cached_blocks,
            num_pinned_blocks=stats.num_pinned_blocks,
            full_step_ns=full_step_ns,
        )


# ---- events


class WorkerUp(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    worker_id: WorkerId
    name: str  # the same after a restart
    spec: WorkerSpec
    role: Role = Role.MIXED
    machine: str = ""  # workers that name the same one are as fast as each other; empty = unknown
    step_tokens: int = 512
    max_running_seqs: int = 256
    cost: FittedCostModel | None = None  # None = unknown: the prior stands in
    publishes_kv: bool = True  # False = no WorkerKv will come; the router guesses what it caches
    adapters: tuple[str, ...] = ()
    kv_address: str = ""  # where other workers copy its KV from; empty = nowhere
    kv_block_bytes: int = 0  # on the wire; 0 = its blocks cannot be moved


class WorkerDown(msgspec.Struct, frozen=True, tag=True):
    """What ran there is no longer booked; the front end sends each again with RouteArrive."""

    worker_id: WorkerId
    reason: str
    is_failure: bool = True  # False = it was asked to leave


class WorkerDrain(msgspec.Struct, frozen=True, tag=True):
    """No new requests; those in flight stay."""

    worker_id: WorkerId


class WorkerRole(msgspec.Struct, frozen=True, tag=True):
    """It is for something else from here on. What it has begun ends there, as it would have."""

    worker_id: WorkerId
    role: Role


class WorkersStarting(msgspec.Struct, frozen=True, tag=True):
    """So many are about to come up. While any is, nobody is refused for want of a worker."""

    num_workers: int


class RouteArrive(msgspec.Struct, frozen=True, tag=True):
    """A request wants a worker; again with the same id after the worker it was on has died."""

    request: RouteRequest


class RouteStarted(msgspec.Struct, frozen=True, tag=True):
    """Its prefill is over: the first token was seen."""

    request_id: int


class RouteProgress(msgspec.Struct, frozen=True, tag=True):
    request_id: int
    num_output_tokens: int  # of all choices, since its last RouteArrive


class RouteDone(msgspec.Struct, frozen=True, tag=True):
    """It ended or was cancelled, wherever it was. Idempotent, unknown ids included."""

    request_id: int


class RouteFailed(msgspec.Struct, frozen=True, tag=True):
    """Its worker answered with a fault of its own, which counts against the worker."""

    request_id: int
    reason: str = ""


class WorkerStats(msgspec.Struct, frozen=True, tag=True):
    """`num_received` of this router's Dispatches had reached the worker when it counted, from its
    WorkerUp on, so that none is counted twice; None = unknown.
    """

    worker_id: WorkerId
    stats: WorkerLoad
    num_received: int | None = None


class WorkerKv(msgspec.Struct, frozen=True, tag=True):
    """Changes of a worker's prefix cache; the first has number `first_seq_no`, others follow.

    Numbers begin with 0 at WorkerUp.
    """

    worker_id: WorkerId
    first_seq_no: int
    changes: tuple[KvChange, ...]


class WorkerKvSnapshot(msgspec.Struct, frozen=True, tag=True):
    """All blocks that the worker has cached; the next change has the number `seq_no`."""

    worker_id: WorkerId
    seq_no: int
    names: tuple[bytes, ...]


RouterEvent: TypeAlias = (
    WorkerUp
    | WorkerDown
    | WorkerDrain
    | WorkerRole
    | WorkersStarting
    | RouteArrive
    | RouteStarted
    | RouteProgress
    | RouteDone
    | RouteFailed
    | WorkerStats
    | WorkerKv
    | WorkerKvSnapshot
    | Timer
)

# ---- effects


class Dispatch(msgspec.Struct, frozen=True, tag=True):
    request_id: int
    worker_id: WorkerId
    decision: Decision


class Queued(msgspec.Struct, frozen=True, tag=True):
    """The request waits in the router; Dispatch or RouteReject will follow."""

    request_id: int
    reason: str


class RouteReject(msgspec.Struct, frozen=True, tag=True):
    """The only word on a request that gets no worker."""

    request_id: int
    status_hint: int
    code: str
    message: str
    hint: str = ""
    retry_after_s: float | None = None


class Resync(msgspec.Struct, frozen=True, tag=True):
    """Changes of this worker's cache were lost: it should send a snapshot."""

    worker_id: WorkerId


RouterEffect: TypeAlias = Dispatch | Queued | RouteReject | Resync | CallAt
