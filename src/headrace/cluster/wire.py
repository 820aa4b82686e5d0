"""What a front end and its workers say to each other: typed, versioned, nothing else is read.

Times on the wire are of the sender's monotonic clock, and mean something to the receiver only
beside `sent_ns`: two machines' clocks have nothing in common but their pace.
"""

from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import islice
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec

from headrace.core.base.errors import TransferError
from headrace.core.base.events import (
    Admitted,
    Cancel,
    Computed,
    Emit,
    EndLease,
    Expect,
    Finish,
    KvChange,
    Preempted,
    Reject,
)
from headrace.core.base.names import few_lines, one_line
from headrace.core.base.plan import WorkerSpec
from headrace.core.base.request import SeqSpec
from headrace.core.base.types import Ns, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.ledger import KvPlan
from headrace.core.config.schema import Config
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.engine.stats import EngineStats
from headrace.core.router.events import WorkerLoad, WorkerUp
from headrace.core.telemetry.record import RequestRecord
from headrace.models.load import ModelDescription

PROTOCOL: Final = 8
MAX_CANARY_TOKENS: Final = 64
MAX_PART_NAMES: Final = 1 << 18  # of a snapshot: 5 MB, behind which other words need not wait long
WORKER_NAME: Final = r"\A[A-Za-z0-9._-]{1,64}\Z"  # it goes into headers, labels and logs
PLACE: Final = r"\A[\x20-\x7e]{0,1024}\Z"  # it goes to other workers, and into logs
MAX_STAGE_CHARS: Final = 64
TO_WORKER, FROM_WORKER = "to worker", "from worker"  # directions of frames

# ---- to a worker


class Configure(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message. `num_sharing` workers share this machine's cores and memory."""

    protocol: int = PROTOCOL
    config: Config
    role: Role = Role.MIXED
    num_sharing: int = 1


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Sequences of one request, which arrive together."""

    seqs: tuple[SeqSpec, ...]
    sent_ns: Ns


class Dismiss(msgspec.Struct, frozen=True, tag=True):
    """This worker does not fit to the others, and need not come again as it is."""

    reason: str


class SendSnapshot(msgspec.Struct, frozen=True, tag=True):
    """Tell all that the prefix cache holds."""


class SetRole(msgspec.Struct, frozen=True, tag=True):
    """Be for something else from now on, if no front end minds, and say so to all of them."""

    role: Role


class RoleVote(msgspec.Struct, frozen=True, tag=True):
    """The answer to RoleWanted: whether this front end can do with that."""

    vote_id: int
    agrees: bool


class Renew(msgspec.Struct, frozen=True, tag=True):
    """The front end lives, whether or not there is something to do."""


class Audit(msgspec.Struct, frozen=True, tag=True):
    """Check every law of the engine, and say whether they hold."""

    audit_id: int


class Canary(msgspec.Struct, frozen=True, tag=True):
    """Answer this, greedily, and let the front end alone judge it. It is nobody's request."""

    canary_id: int
    prompt_tokens: tuple[int, ...]
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_CANARY_TOKENS)]


ToWorker: TypeAlias = (
    Configure
    | Submit
    | Cancel
    | EndLease
    | Expect
    | Computed
    | SendSnapshot
    | SetRole
    | RoleVote
    | Renew
    | Audit
    | Canary
    | Dismiss
)

# ---- from a worker


class Hello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message of a worker that has come by itself; it waits to be configured."""

    protocol: int = PROTOCOL
    name: Annotated[str, msgspec.Meta(pattern=WORKER_NAME)]  # of the machine, for people
    role: Role = Role.MIXED
    ticket: str = ""  # of the life that the front end waits for; empty = it has not been sent for


class Loading(msgspec.Struct, frozen=True, tag=True):
    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The model is loaded; requests may come. `config` has nothing open in it."""

    protocol: int = PROTOCOL
    pid: int
    role: Role = Role.MIXED
    spec: WorkerSpec
    config: Config
    kv: KvPlan
    kv_address: Annotated[
        str, msgspec.Meta(pattern=PLACE)
    ]  # where other workers copy KV from; empty = nowhere
    cost: FittedCostModel
    description: ModelDescription

    @property
    def kind(self) -> str:
        """What has to be alike wherever a request may run, for people."""
        device = self.config.device
        return (
            f"model and arithmetic {self.spec.model_digest[:12]} ({device.activations} activations,"
            f" {device.attention} attention) with KV in {self.spec.kv_dtype}, "
            f"blocks of {self.spec.block_size} tokens"
        )


class Unfit(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot serve as it is configured, and trying again would not help."""

    message: str
    hint: str = ""


Word: TypeAlias = Admitted | Computed | Emit | Preempted | Finish | Reject


class Turn(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What one event of the engine has to say. Changes of the cache are numbered from `kv_no` on;
    `num_received` requests had come, or been announced, when the load was counted.
    """

    words: tuple[Word, ...] = ()
    records: tuple[RequestRecord, ...] = ()  # of the sequences that finish here
    kv_no: int = 0
    kv: tuple[KvChange, ...] = ()
    load: WorkerLoad | None = None  # some turns tell it, often enough
    num_received: int = 0


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The worker lives, whether or not there is something to do."""

    stats: EngineStats | None = None  # None while it loads
    num_received: int = 0
    cost: FittedCostModel | None = None  # what its steps take, now and then where that is recorded


class RoleIs(msgspec.Struct, frozen=True, tag=True):
    """What the worker is for, whoever has asked for that."""

    role: Role


class RoleWanted(msgspec.Struct, frozen=True, tag=True):
    """A front end wants the worker to be for that, and stop decoding: it asks all of them."""

    vote_id: int
    role: Role


class RoleSettled(msgspec.Struct, frozen=True, tag=True):
    """What has come of RoleWanted: `is_so`, or else a front end needs it as it is, or
    (`is_overtaken`) whoever wanted that is gone, or something else is wanted by now.
    """

    vote_id: int
    role: Role
    is_so: bool
    is_overtaken: bool = False


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    """All blocks that are cached, in parts that follow one another, since a frame is bounded; the
    next change has the number `kv_no`.
    """

    kv_no: int
    names: tuple[bytes, ...]
    is_last: bool = True


class Audited(msgspec.Struct, frozen=True, tag=True):
    audit_id: int
    fault: str  # empty = every law holds


class Canaried(msgspec.Struct, frozen=True, tag=True):
    """What the worker answers to a Canary: tokens, and how likely each was."""

    canary_id: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    fault: str = ""  # why there is no answer; empty = there is
    is_refused: bool = False  # it came at a bad time, and may be asked again


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine has stopped for good."""

    reason: str


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The worker was told to end: it wants nothing new, and to be hung up on when what it has is
    done, or has gone elsewhere after that time.
    """

    within_s: Annotated[float, msgspec.Meta(ge=0, le=1e5)]


FromWorker: TypeAlias = (
    Hello
    | Loading
    | Ready
    | Unfit
    | Turn
    | Beat
    | RoleIs
    | RoleWanted
    | RoleSettled
    | Snapshot
    | Audited
    | Canaried
    | Failed
    | Leave
)


def snapshot_parts(kv_no: int, names: Collection[bytes]) -> Iterator[Snapshot]:
    rest, num_left = iter(names), len(names)
    while num_left > MAX_PART_NAMES:
        num_left -= MAX_PART_NAMES
        yield Snapshot(kv_no, tuple(islice(rest, MAX_PART_NAMES)), is_last=False)
    yield Snapshot(kv_no, tuple(rest))


def up_of(worker_id: WorkerId, name: str, ready: Ready) -> WorkerUp:
    """What a router has to know of a worker that is ready."""
    scheduler = ready.config.scheduler
    return WorkerUp(
        worker_id=worker_id,
        name=name,
        spec=ready.spec,
        role=ready.role,
        machine=_machine_of(ready),
        step_tokens=scheduler.step_tokens,
        max_running_seqs=scheduler.max_running_seqs,
        cost=ready.cost,
        kv_address=ready.kv_address,
        kv_block_bytes=ready.kv.block_bytes if ready.kv_address else 0,
        publishes_kv=ready.config.kv.prefix_cache,
    )


def _machine_of(ready: Ready) -> str:
    """The machine that its pool is on, and how much of it it uses; empty = unknown."""
    kind, _, place = ready.kv_address.partition(":")
    return f"{place.partition(':')[0]} {ready.config.device}" if kind == "shm" else ""


class OtherProtocol(TransferError):
    """Whoever says this is of another version. Nothing of it has been read but that."""

    def __init__(self, protocol: int) -> None:
        super().__init__(f"it speaks protocol {protocol}, not {PROTOCOL}")
        self.protocol = protocol


class _Stamp(msgspec.Struct):
    """What a first message of any version has, whatever else may change."""

    protocol: int


Message = TypeVar("Message")
_IN_WORDS: Final = (Finish, Reject, Preempted)  # what a turn says in them

encode = msgspec.msgpack.Encoder().encode
_to_worker: Final = msgspec.msgpack.Decoder(ToWorker)
_from_worker: Final = msgspec.msgpack.Decoder(FromWorker)
_stamp: Final = msgspec.msgpack.Decoder(_Stamp)


def decode_to_worker(payload: bytes) -> ToWorker:
    """TransferError for anything else, OtherProtocol for another version's."""
    return _decode(_to_worker, payload)


def decode_from_worker(payload: bytes) -> FromWorker:
    """TransferError for anything else, OtherProtocol for another version's."""
    return _decode(_from_worker, payload)


def _decode(decoder: "msgspec.msgpack.Decoder[Message]", payload: bytes) -> Message:
    try:
        message = decoder.decode(payload)
    except msgspec.DecodeError as error:
        with suppress(msgspec.DecodeError):
            _check_protocol(_stamp.decode(payload).protocol)
        raise TransferError(f"a message that is none of ours: {one_line(str(error))}") from error
    if isinstance(message, Configure | Hello | Ready):
        _check_protocol(message.protocol)
    return _tamed(message)


def _tamed(message: Message) -> Message:
    """What a message says in words goes into logs, answers and terminals, whoever says it."""
    match message:
        case Turn(words=words) if any(isinstance(word, _IN_WORDS) for word in words):
            return msgspec.structs.replace(message, words=tuple(map(_tamed_word, words)))
        case Unfit():
            # A configuration may have many faults, one on a line.
            return msgspec.structs.replace(
                message, message=few_lines(message.message), hint=one_line(message.hint)
            )
        case Failed() | Dismiss():
            return msgspec.structs.replace(message, reason=one_line(message.reason))
        case Loading():
            return msgspec.structs.replace(message, stage=one_line(message.stage, MAX_STAGE_CHARS))
        case Audited() | Canaried():
            return msgspec.structs.replace(message, fault=one_line(message.fault))
        case _:
            return message


def _tamed_word(word: Word) -> Word:
    match word:
        case Finish(error=error) if error:
            return msgspec.structs.replace(word, error=one_line(error))
        case Preempted(reason=reason):
            return msgspec.structs.replace(word, reason=one_line(reason))
        case Reject():
            return msgspec.structs.replace(
                word,
                code=one_line(word.code, MAX_STAGE_CHARS),
                message=one_line(word.message),
                hint=one_line(word.hint),
            )
        case _:
            return word


def _check_protocol(protocol: int) -> None:
    if protocol != PROTOCOL:
        raise OtherProtocol(protocol)
