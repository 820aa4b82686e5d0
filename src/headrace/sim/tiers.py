"""Lower tiers of a worker's KV, as capacity and bandwidth: what its device evicts goes to the first
one, what overflows there to the next, and what overflows the last is gone.

A model until there is a real policy: each tier keeps what was evicted or loaded last (LRU), and its
link carries one block after another, in both directions. Decides what lies where and how long it
takes, and asks the cost model whether that is worth it; refuses to know who serves.
"""

from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence

import msgspec

from headrace.core.base.events import TIERS, BlocksRemoved, BlocksStored, KvChange
from headrace.core.base.plan import WorkerSpec
from headrace.core.base.request import SeqSpec
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.config.schema import KvConfig
from headrace.core.cost.fitted import FittedCostModel, Link
from headrace.core.cost.model import StepShape
from headrace.core.kv.names import BlockChain, root_name


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """Of each worker."""

    name: str
    num_bytes: int
    link: Link


class Tiers:
    def __init__(self, tiers: Sequence[Tier], block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._links = [tier.link for tier in tiers]
        self._num_blocks = [tier.num_bytes // block_bytes for tier in tiers]
        self._held: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in tiers]
        self._free_ns = [0.0] * len(tiers)  # when each link has carried what it was given

    def __contains__(self, name: object) -> bool:
        return any(name in held for held in self._held)

    def __len__(self) -> int:
        return sum(map(len, self._held))

    def names(self) -> list[bytes]:
        return [name for held in self._held for name in held]

    def put(self, now: Ns, name: bytes) -> list[bytes]:
        """The device has evicted it; what is gone for good with that. Nothing is written that a
        tier holds already.
        """
        for held in self._held:
            if name in held:
                held.move_to_end(name)
                return []
        over = [name]
        for place, (held, most) in enumerate(zip(self._held, self._num_blocks, strict=True)):
            for one in over:
                held[one] = None
                self._carry(now, place, 1)
            over = [held.popitem(last=False)[0] for _ in range(max(0, len(held) - most))]
        return over

    def load_ns(self, now: Ns, names: Sequence[bytes]) -> Ns:
        """How long it would take to bring these, which are all here."""
        loads = self._by_tier(names)
        return Ns(max((self._end_ns(now, *load) for load in loads), default=now) - now)

    def load(self, now: Ns, names: Sequence[bytes]) -> Ns:
        """The same, and it is done: their links are busy until then."""
        took_ns = self.load_ns(now, names)
        for place, num_blocks in self._by_tier(names):
            self._free_ns[place] = self._end_ns(now, place, num_blocks)
        for name in names:
            for held in self._held:
                if name in held:
                    held.move_to_end(name)
        return took_ns

    def _by_tier(self, names: Sequence[bytes]) -> list[tuple[int, int]]:
        counts = [sum(name in held for name in names) for held in self._held]
        return [(place, count) for place, count in enumerate(counts) if count]

    def _end_ns(self, now: Ns, place: int, num_blocks: int) -> Ns:
        link = self._links[place]
        carried_ns = link.latency_ns + link.byte_ns * self._block_bytes * num_blocks
        return Ns(round(max(now, self._free_ns[place]) + carried_ns))

    def _carry(self, now: Ns, place: int, num_blocks: int) -> None:
        """Writing takes the link, and nobody waits for it."""
        busy_ns = self._links[place].byte_ns * self._block_bytes * num_blocks
        self._free_ns[place] = max(now, self._free_ns[place]) + busy_ns


class WorkerTiers:
    """Lower tiers beneath one worker's device, whose cached blocks are `cached`."""

    def __init__(
        self,
        tiers: Tiers,
        cached: Mapping[bytes, None],
        spec: WorkerSpec,
        believed: FittedCostModel,
        kv: KvConfig,
    ) -> None:
        self._tiers, self._cached = tiers, cached
        self._spec, self._believed, self._kv = spec, believed, kv

    def offer(self, now: Ns, spec: SeqSpec) -> SeqSpec:
        """The same, with its KV to come from lower tiers as far as these have it, where computing
        that would take longer.
        """
        if spec.kv_source or not len(self._tiers):
            return spec
        names = self._names_of(spec)
        num_here = num_leading(self._cached, names)
        found = names[num_here : num_here + num_leading(self._tiers, names[num_here:])]
        if not found:
            return spec
        size = self._spec.block_size
        start, num = num_here * size, len(found) * size
        pairs = num * start + num * (num + 1) // 2
        compute_ns = self._believed.step_ns(StepShape(num, 1, 0, pairs, start + num))
        if self._tiers.load_ns(now, found) >= min(compute_ns, self._kv.load_timeout_s * NS_PER_S):
            return spec
        return msgspec.structs.replace(spec, kv_source=TIERS)

    def load(self, now: Ns, names: Sequence[bytes]) -> tuple[int, Ns]:
        """How many of these come, up to the first that is not there, and when."""
        found = names[: num_leading(self._tiers, names)]
        return len(found), self._tiers.load(now, found)

    def names(self) -> dict[bytes, None]:
        """Of all that is here, on the device or below."""
        return dict.fromkeys(self._tiers.names()) | dict(self._cached)

    def seen_from_above(self, now: Ns, changes: Sequence[KvChange]) -> tuple[KvChange, ...]:
        """What a router hears of the device's changes: what lower tiers keep is still here."""
        told: list[KvChange] = []
        for change in changes:
            if isinstance(change, BlocksStored):
                told.append(change)
                continue
            gone = [name for one in change.names for name in self._tiers.put(now, one)]
            if gone := [name for name in gone if name not in self._cached]:
                told.append(BlocksRemoved(tuple(gone)))
        return tuple(told)

    def _names_of(self, spec: SeqSpec) -> list[bytes]:
        """Of all full blocks before its last known token, which is computed in any case."""
        facts = self._spec
        root = root_name(
            facts.model_digest, facts.kv_dtype, facts.block_size, spec.adapter, spec.salt
        )
        chain = BlockChain(root, facts.block_size)
        chain.extend((*spec.prompt_tokens, *spec.output_tokens)[:-1])
        return chain.names


def num_leading(held: Container[bytes], names: Sequence[bytes]) -> int:
    """How many of these are held, up to the first that is not."""
    for index, name in enumerate(names):
        if name not in held:
            return index
    return len(names)
