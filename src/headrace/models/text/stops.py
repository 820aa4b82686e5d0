"""Stop strings in a text that arrives in pieces."""

from collections.abc import Sequence

from headrace.core.base.errors import RequestError


class StopMatcher:
    """Finds the stop string that is complete first; of those that end at the same character, the
    longest.

    The answer does not depend on how the text was cut into pushes. Each character costs amortised
    O(1) for each stop string (Knuth, Morris and Pratt 1977): per stop, the length of its longest
    beginning that the text so far ends with. The longest of these beginnings is what must be held
    back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include`: the matched stop string is part of the text."""
        if "" in stops:
            raise RequestError("a stop string is empty", param="stop")
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._lengths = [0] * len(self._stops)
        self._held = ""
        self._include = include
        self.matched: str | None = None

    @property
    def passes_all(self) -> bool:
        """Whether there is nothing to look for."""
        return not self._stops

    def push(self, text: str) -> str:
        """The text that is safe to send; after a match, everything before it, and from then on
        nothing.
        """
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        held, self._held = self._held, ""
        for index, char in enumerate(text):
            stop = self._advance(char)
            if stop is not None:
                self.matched = stop
                seen = held + text[: index + 1]
                return seen if self._include else seen[: -len(stop)]
        seen = held + text
        safe = len(seen) - max(self._lengths, default=0)
        self._held = seen[safe:]
        return seen[:safe]

    def flush(self) -> str:
        """What was held back; the text is over."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """The longest stop string that ends with `char`, if any does."""
        found: str | None = None
        for number, (stop, borders) in enumerate(self._stops):
            length = self._lengths[number]
            while length and stop[length] != char:
                length = borders[length - 1]
            if stop[length] == char:
                length += 1
            self._lengths[number] = length
            if length == len(stop) and (found is None or length > len(found)):
                found = stop
        return found


def _borders(stop: str) -> list[int]:
    """For each beginning of `stop`, the length of its longest proper beginning that is also its
    end.
    """
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[length] != stop[index]:
            length = borders[length - 1]
        if stop[length] == stop[index]:
            length += 1
        borders[index] = length
    return borders
