"""The workers as the front end needs them: where their KV is, and what they are for.

Decides whether there is anybody who computes prompts for others; refuses to choose a worker. Pure.
"""

import msgspec

from headrace.core.base.plan import WorkerSpec
from headrace.core.base.types import WorkerId
from headrace.core.base.worker import Role
from headrace.core.router.events import WorkerUp


class Members:
    """Those that are up."""

    def __init__(self) -> None:
        self._ups: dict[WorkerId, WorkerUp] = {}
        self._prefill: set[WorkerId] = set()  # of these; each request asks for them
        self._leaving: set[WorkerId] = set()  # of these; they get nothing new
        self._stalled: dict[WorkerId, None] = {}  # of these; they may have stopped

    def __contains__(self, worker_id: WorkerId) -> bool:
        return worker_id in self._ups

    @property
    def has_prefill(self) -> bool:
        """Whether any may be asked to compute a prompt for whoever decodes it."""
        return any(
            worker_id not in self._leaving and worker_id not in self._stalled
            for worker_id in self._prefill
        )

    def may_decode(self, worker_id: WorkerId | None) -> bool:
        up = None if worker_id is None else self._ups.get(worker_id)
        return up is not None and up.role is not Role.PREFILL

    def stalled(self) -> list[WorkerId]:
        return list(self._stalled)

    def can_do_without(self, worker_id: WorkerId) -> bool:
        """Whether another one decodes, and is well."""
        return any(
            up.role is not Role.PREFILL
            and up.worker_id != worker_id
            and up.worker_id not in self._leaving
            and up.worker_id not in self._stalled
            for up in self._ups.values()
        )

    def shunned(self) -> tuple[WorkerId, ...]:
        """Those that have stalled, where others can take their place: nothing new goes there."""
        return tuple(
            one
            for one in self._stalled
            if self._ups[one].role is Role.PREFILL or self.can_do_without(one)
        )

    @property
    def spec(self) -> WorkerSpec | None:
        """Of any of them, since all serve the same model."""
        return next((up.spec for up in self._ups.values()), None)

    def address(self, holder: WorkerId | None, reader: WorkerId) -> str:
        """Where the reader can copy the holder's KV from; empty = nowhere. The memory of one that
        has stalled is still there, for who is on the same machine.
        """
        up = None if holder is None else self._ups.get(holder)
        if up is None:
            return ""
        if up.worker_id not in self._stalled:
            return up.kv_address
        other = self._ups.get(reader)
        is_near = up.machine != "" and other is not None and other.machine == up.machine
        return up.kv_address if is_near else ""

    def note(self, worker_id: WorkerId, *, is_stalled: bool) -> None:
        if is_stalled and worker_id in self._ups:
            self._stalled[worker_id] = None
        else:
            self._stalled.pop(worker_id, None)

    def add(self, up: WorkerUp) -> None:
        self._ups[up.worker_id] = up
        if up.role is Role.PREFILL:
            self._prefill.add(up.worker_id)
        else:
            self._prefill.discard(up.worker_id)

    def set_role(self, worker_id: WorkerId, role: Role) -> None:
        """Also of one whose last word comes after the news of its end."""
        if worker_id in self._ups:
            self.add(msgspec.structs.replace(self._ups[worker_id], role=role))

    def drain(self, worker_id: WorkerId) -> None:
        self._leaving.add(worker_id)

    def remove(self, worker_id: WorkerId) -> WorkerUp:
        self._leaving.discard(worker_id)
        self._stalled.pop(worker_id, None)
        self._prefill.discard(worker_id)
        return self._ups.pop(worker_id)
