"""What a supervisor tells people of its workers."""

from headrace.cluster.canary import Canaries
from headrace.cluster.fleet import Fleet, Slot
from headrace.core.base.types import Ns
from headrace.live.port import WorkerPhase, WorkerState


def worker_states(now: Ns, fleet: Fleet, canaries: Canaries) -> list[WorkerState]:
    return [
        WorkerState(
            name=slot.name,
            role=slot.role.value,
            phase=_phase(slot, canaries),
            has_come=slot.has_come,
            is_ready=slot.is_ready,
            pid=slot.process.pid if slot.process is not None else None,
            num_starts=slot.num_starts,
            stats=slot.stats,
            fault=slot.fault,
            cause=slot.cause.value if slot.cause else "",
            losses={cause.value: num for cause, num in slot.losses.items()},
            restart_in_s=fleet.restart_in_s(slot, now),
        )
        for slot in fleet
    ]


def _phase(slot: Slot, canaries: Canaries) -> WorkerPhase:
    if slot.process is None:
        return WorkerPhase.DOWN
    if slot.leaving is not None:
        return WorkerPhase.DRAINING
    if slot.is_ready:
        return WorkerPhase.READY
    return WorkerPhase.CANARY if canaries.is_tried(slot) else WorkerPhase.STARTING
