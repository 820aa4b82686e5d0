"""What a supervisor tells people of its workers."""

from collections.abc import Iterable
from typing import Final

from headrace.cluster.canary import Canaries
from headrace.cluster.fleet import Fleet, Slot
from headrace.core.base.types import Ns
from headrace.live.port import WorkerPhase, WorkerState

_VERBS: Final = {"fetch": "fetches the model", "load": "loads the model"}


def worker_states(now: Ns, fleet: Fleet, canaries: Canaries) -> list[WorkerState]:
    return [
        WorkerState(
            name=slot.name,
            role=slot.role.value,
            phase=_phase(slot, canaries),
            stage=_stage(slot, canaries),
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


def _stage(slot: Slot, canaries: Canaries) -> str:
    if slot.process is None or slot.is_ready or slot.leaving is not None:
        return ""
    if canaries.is_tried(slot):
        return "answers its canary"
    if not slot.has_come:
        return "waits for a place"
    match slot.loading:
        case None:
            return "starts"
        case (stage, done, total) if done < total or stage == "fetch":
            return f"{_VERBS.get(stage, stage)} ({done / total:.0%})"
        case _:
            return "measures what its steps take"


def awaited(workers: Iterable[WorkerState]) -> str:
    """Which workers are not ready and what each is about, for people; empty = all are."""
    return ", ".join(
        f"{worker.name} {worker.stage or _pause(worker)}"
        for worker in workers
        if not worker.is_ready
    )


def _pause(worker: WorkerState) -> str:
    if worker.restart_in_s is None:
        return "leaves"
    why = f", {worker.fault}" if worker.fault else ""
    return f"starts in {worker.restart_in_s:.0f} s{why}"
