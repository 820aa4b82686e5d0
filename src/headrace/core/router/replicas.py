"""Which workers have which block: one map from names to sets of workers, a set being the bits of an
integer.

Whoever has a faster or smaller map may lend it (`replicas_with`).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

# Each part is small enough to be resized or swept within one event.
NUM_PARTS: Final = 4096


def part_of(name: bytes) -> int:
    """Names are 16 bytes, or at least 2 that are spread evenly."""
    return name[0] << 4 | name[1] >> 4


class Replicas(Protocol):
    def add(self, bit: int, names: Iterable[bytes]) -> int:
        """This worker has these blocks: how many of them it did not have."""
        ...

    def remove(self, bit: int, names: Iterable[bytes]) -> int:
        """It has them no more: how many of them it had."""
        ...

    def get(self, name: bytes) -> int:
        """Who has this block."""
        ...

    def discard(self, part: int, bits: int) -> int:
        """Take workers out of a part, from 0 to NUM_PARTS - 1: how many replicas were theirs."""
        ...

    def items(self) -> Iterable[tuple[bytes, int]]:
        """Every block that somebody has, and who."""
        ...


class DictReplicas:
    """Replicas in dicts. Most blocks have one replica, and share its integer."""

    def __init__(self) -> None:
        self._parts: list[dict[bytes, int]] = [{} for _ in range(NUM_PARTS)]

    def add(self, bit: int, names: Iterable[bytes]) -> int:
        parts, count = self._parts, 0
        for name in names:
            part = parts[part_of(name)]
            mask = part.get(name, 0)
            if not mask & bit:
                part[name] = mask | bit if mask else bit
                count += 1
        return count

    def remove(self, bit: int, names: Iterable[bytes]) -> int:
        parts, count = self._parts, 0
        for name in names:
            part = parts[part_of(name)]
            mask = part.get(name, 0)
            if mask & bit:
                count += 1
                if mask == bit:
                    del part[name]
                else:
                    part[name] = mask ^ bit
        return count

    def get(self, name: bytes) -> int:
        return self._parts[part_of(name)].get(name, 0)

    def discard(self, part: int, bits: int) -> int:
        return discard(self._parts[part], bits)

    def items(self) -> Iterator[tuple[bytes, int]]:
        for part in self._parts:
            yield from part.items()


def discard(part: dict[bytes, int], bits: int) -> int:
    """Take workers out of every set; returns in how many places they were."""
    count = 0
    for name, mask in [entry for entry in part.items() if entry[1] & bits]:
        count += (mask & bits).bit_count()
        if mask & ~bits:
            part[name] = mask & ~bits
        else:
            del part[name]
    return count


_make: Callable[[], Replicas] = DictReplicas


def replicas_with(make: Callable[[], Replicas]) -> None:
    """From now on, indexes keep their replicas in what this makes."""
    global _make
    _make = make


def new_replicas() -> Replicas:
    return _make()
