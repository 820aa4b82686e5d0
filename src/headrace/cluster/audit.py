"""A check of the whole cluster under way: whose word is still to come, and what was found."""

from concurrent.futures import Future

from headrace.core.base.errors import InvariantError


class Audit:
    def __init__(self, done: Future[None]) -> None:
        self._done = done
        self.waiting: set[str] = set()  # names of workers
        self.faults: list[str] = []

    def end(self) -> None:
        """Tell whoever waits; not on behalf of a lock that they might want."""
        if self.faults:
            self._done.set_exception(InvariantError("; ".join(self.faults)))
        else:
            self._done.set_result(None)
