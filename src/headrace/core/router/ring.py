"""Consistent hashing of sessions onto workers' names (Karger et al., 1997): when a worker comes or
goes, only the sessions of its arcs move, and a restarted worker finds its own again.
"""

from bisect import bisect
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Final

POINTS_PER_NAME: Final = 64


class Ring:
    def __init__(self, names: Iterable[str]) -> None:
        points = sorted(
            (_point(f"{name}/{i}"), name) for name in set(names) for i in range(POINTS_PER_NAME)
        )
        self._points = [point for point, _ in points]
        self._names = [name for _, name in points]

    def order(self, key: str) -> Iterator[str]:
        """The names, each once, in the order in which they are asked to take the key."""
        start = bisect(self._points, _point(key))
        return iter(dict.fromkeys(self._names[start:] + self._names[:start]))


def _point(text: str) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:8], "little")
