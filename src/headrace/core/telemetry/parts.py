"""Where the time of a sequence went: ten causes that never overlap and leave nothing out."""

from enum import StrEnum

import msgspec

from headrace.core.base.types import Ns


class Cause(StrEnum):
    """What a sequence spent time on. The order is that of its life, and breaks ties."""

    ROUTER_WAIT = "router_wait"  # at the server, before the engine knew of it
    QUEUE = "queue"  # in the engine, before its first admission; and while nothing ran
    KV_LOAD = "kv_load"  # its KV came from a slower tier
    TRANSFER = "transfer"  # its KV came from another worker
    OWN_PREFILL = "own_prefill"  # its prompt was computed
    OTHERS_PREFILL = "others_prefill"  # it waited for prompts of others, or shared steps with them
    PREEMPTION = "preemption"  # it waited again, or computed again what it had lost
    DECODE = "decode"  # its output was computed
    DECODE_INTERFERENCE = "decode_interference"  # the same for output of others
    CLIENT_BACKPRESSURE = "client_backpressure"  # its client did not read


# The places of causes in a list of times.
(
    ROUTER_WAIT,
    QUEUE,
    KV_LOAD,
    TRANSFER,
    OWN_PREFILL,
    OTHERS_PREFILL,
    PREEMPTION,
    DECODE,
    DECODE_INTERFERENCE,
    CLIENT_BACKPRESSURE,
) = range(len(Cause))
_CAUSES = tuple(Cause)


class TimeParts(msgspec.Struct, frozen=True):
    """An interval of a sequence's life, cut up by cause; none is negative."""

    router_wait_ns: Ns = Ns(0)
    queue_ns: Ns = Ns(0)
    kv_load_ns: Ns = Ns(0)
    transfer_ns: Ns = Ns(0)
    own_prefill_ns: Ns = Ns(0)
    others_prefill_ns: Ns = Ns(0)
    preemption_ns: Ns = Ns(0)
    decode_ns: Ns = Ns(0)
    decode_interference_ns: Ns = Ns(0)
    client_backpressure_ns: Ns = Ns(0)

    @property
    def total_ns(self) -> Ns:
        """Exactly the length of the interval."""
        return Ns(sum(msgspec.structs.astuple(self)))

    @property
    def main_cause(self) -> Cause:
        """The largest part's."""
        times = msgspec.structs.astuple(self)
        return _CAUSES[times.index(max(times))]

    def by_cause(self) -> dict[Cause, Ns]:
        return dict(zip(_CAUSES, msgspec.structs.astuple(self), strict=True))

    def __add__(self, other: "TimeParts") -> "TimeParts":
        """Of two intervals, one after the other."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return TimeParts(*(Ns(mine + its) for mine, its in pairs))

    def __sub__(self, other: "TimeParts") -> "TimeParts":
        """What an interval has beyond its beginning `other`."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return TimeParts(*(Ns(mine - its) for mine, its in pairs))
