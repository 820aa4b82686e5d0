"""A check of the whole cluster under way: whose word is still to come, and what was found."""

from collections.abc import Iterable
from concurrent.futures import Future
from itertools import count

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


class Audits:
    """Those that are under way, by their ids."""

    def __init__(self) -> None:
        self._ids = count()
        self._audits: dict[int, Audit] = {}

    def begin(self, audit: Audit, names: Iterable[str]) -> int:
        """Its id. These workers are asked."""
        audit_id = next(self._ids)
        self._audits[audit_id] = audit
        audit.waiting.update(names)
        self._end(audit_id, "")
        return audit_id

    def hear(self, audit_id: int, name: str, fault: str) -> None:
        if fault and audit_id in self._audits:
            self._audits[audit_id].faults.append(f"{name}: {fault}")
        self._end(audit_id, name)

    def lose(self, name: str) -> None:
        """Nothing more will come from this worker."""
        for audit_id in list(self._audits):
            self._end(audit_id, name)

    def _end(self, audit_id: int, name: str) -> None:
        """The audit ends with the last one."""
        audit = self._audits.get(audit_id)
        if audit is None:
            return
        audit.waiting.discard(name)
        if not audit.waiting:
            del self._audits[audit_id]
            audit.end()
