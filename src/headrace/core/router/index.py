"""How much of a prompt which worker has.

A worker evicts leaves first, so what it has of a chain is a prefix of it, and the set of workers
that have the i-th block only shrinks with i. A match therefore bisects instead of walking. Where
lost events leave holes, it may take a worker for a better one than it is: that costs time, and
nothing else.

Three layers are read as one:

- *stored*: what workers published;
- *expected*: blocks of requests on their way or in prefill, so that twins meet;
- *remembered*: prompts of workers that publish nothing, for one to two times half the TTL.

Decides nothing about time to live beyond that; refuses to know what a worker is.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from headrace.core.base.errors import InvariantError
from headrace.core.base.events import BlocksStored, KvChange
from headrace.core.base.types import Ns
from headrace.core.router.replicas import NUM_PARTS, discard, new_replicas, part_of


def bits_of(mask: int) -> Iterator[int]:
    """Each worker of a set."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


class PrefixIndex:
    """Slots stand for workers."""

    def __init__(self, ttl_ns: Ns) -> None:
        self._stored = new_replicas()
        self._expected: dict[bytes, int] = {}
        self._remembered: list[dict[bytes, int]] = [{} for _ in range(NUM_PARTS)]
        self._fading: list[dict[bytes, int]] = [{} for _ in range(NUM_PARTS)]
        self._has_remembered = False
        self._ns_per_turn = max(1, ttl_ns // (2 * NUM_PARTS))  # of one part of `remembered`
        self._num_turns = 0
        self._live = 0  # slots in use
        self._dead = 0  # slots that were given up since the sweep began
        self._sweeping = 0  # slots that the sweep takes out
        self._next_swept = 0
        self.num_replicas = 0  # stored ones, those of dead slots included until they are swept

    # ---- slots

    def open_slot(self) -> int:
        """The bit of a new worker. Bits of dead ones come back once nothing mentions them."""
        taken = self._live | self._dead | self._sweeping
        bit = ~taken & (taken + 1)
        self._live |= bit
        return bit

    def close_slot(self, bit: int) -> None:
        """Forget all that this worker has: at once for matches, and bit by bit in memory."""
        self._live &= ~bit
        self._dead |= bit

    def tend(self, now: Ns) -> None:
        """A bounded piece of the work that is never urgent: call it with every event."""
        if self._has_remembered:
            self._turn(now)
        else:
            self._num_turns = now // self._ns_per_turn
        if not self._sweeping:
            if not self._dead:
                return
            self._sweeping, self._dead, self._next_swept = self._dead, 0, 0
            discard(self._expected, self._sweeping)
        part = self._next_swept
        self.num_replicas -= self._stored.discard(part, self._sweeping)
        discard(self._remembered[part], self._sweeping)
        discard(self._fading[part], self._sweeping)
        self._next_swept += 1
        if self._next_swept == NUM_PARTS:
            self._sweeping = 0

    def _turn(self, now: Ns) -> None:
        turn = now // self._ns_per_turn
        self._num_turns = max(self._num_turns, turn - 2 * NUM_PARTS)
        while self._num_turns < turn:
            index = self._num_turns % NUM_PARTS
            self._fading[index], self._remembered[index] = self._remembered[index], {}
            self._num_turns += 1

    # ---- stored

    def apply(self, bit: int, changes: Iterable[KvChange]) -> None:
        for change in changes:
            if type(change) is BlocksStored:
                self.store(bit, change.names)
            else:
                self.num_replicas -= self._stored.remove(bit, change.names)

    def store(self, bit: int, names: Iterable[bytes]) -> None:
        """This worker has these blocks."""
        self.num_replicas += self._stored.add(bit, names)

    # ---- expected and remembered

    def expect(self, bit: int, names: Sequence[bytes]) -> None:
        expected = self._expected
        if expected.keys().isdisjoint(names):
            expected.update(dict.fromkeys(names, bit))
            return
        for name in names:
            expected[name] = expected.get(name, 0) | bit

    def stop_expecting(self, bit: int, names: Sequence[bytes]) -> None:
        expected = self._expected
        if {*map(expected.get, names)} == {bit}:
            for name in names:
                del expected[name]
            return
        for name in names:
            mask = expected.get(name, 0)
            if mask & bit:
                if mask == bit:
                    del expected[name]
                else:
                    expected[name] = mask ^ bit

    def remember(self, bit: int, names: Sequence[bytes]) -> None:
        """This worker has computed these blocks, and will not say when it evicts them."""
        self._has_remembered = True
        for name in names:
            part = self._remembered[part_of(name)]
            part[name] = part.get(name, 0) | bit

    # ---- queries

    def workers_with(self, name: bytes) -> int:
        return self.holders_of(name) | (self._expected.get(name, 0) & self._live)

    def holders_of(self, name: bytes) -> int:
        """Who has it by now, as far as is known."""
        mask = self._stored.get(name)
        if self._has_remembered:
            part = part_of(name)
            mask |= self._remembered[part].get(name, 0) | self._fading[part].get(name, 0)
        return mask & self._live

    def match(self, names: Sequence[bytes], *, is_here: bool = False) -> list[tuple[int, int]]:
        """(workers as bits, leading blocks that they have), for those that have any; deepest first.
        `is_here`: without what is only expected.

        O(d log n) look-ups, with n names and d different depths. Changes nothing.
        """
        workers_with = self.holders_of if is_here else self.workers_with
        found: list[tuple[int, int]] = []
        if not names or not (first := workers_with(names[0])):
            return found
        # Intervals (low, who has `low` blocks, high, who has `high`), rightmost on top.
        have_all = first & workers_with(names[-1]) if len(names) > 1 else first
        if have_all:
            found.append((have_all, len(names)))
        todo = [(1, first, len(names), have_all)]
        while todo:
            low, at_low, high, at_high = todo.pop()
            if at_low == at_high:
                continue
            if high - low <= 1:
                found.append((at_low ^ at_high, low))
                continue
            middle = (low + high) // 2
            at_middle = at_low & workers_with(names[middle - 1]) | at_high
            todo.append((low, at_low, middle, at_middle))
            todo.append((middle, at_middle, high, at_high))
        return found

    def walk(self, names: Sequence[bytes]) -> list[tuple[int, int]]:
        """What `match` returns where nobody has holes, by looking at each name in turn."""
        found: list[tuple[int, int]] = []
        have = self._live
        for depth, name in enumerate(names):
            still = have & self.workers_with(name)
            if still != have and depth:
                found.append((have ^ still, depth))
            have = still
            if not have:
                break
        if have and names:
            found.append((have, len(names)))
        return found[::-1]

    def check(self) -> None:
        """Raise InvariantError unless replicas are counted right and every bit has a slot."""
        known = self._live | self._dead | self._sweeping
        stored = [*self._stored.items()]
        guessed = (*self._remembered, *self._fading, self._expected)
        for name, mask in chain(stored, *(part.items() for part in guessed if part)):
            if not mask or mask & ~known:
                raise InvariantError("block of an unknown worker", name=name.hex())
        count = sum(mask.bit_count() for _, mask in stored)
        if count != self.num_replicas:
            raise InvariantError("replicas miscounted", counted=count, kept=self.num_replicas)
