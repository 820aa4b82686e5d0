"""What a supervisor tells people of its workers."""

from collections.abc import Iterable
from typing import Final

from headrace.cluster.ballot import DECODING
from headrace.cluster.canary import Canaries
from headrace.cluster.fleet import Fleet, Slot
from headrace.core.base.types import Ns
from headrace.core.config.cluster import ClusterConfig
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


def absence(now: Ns, fleet: Fleet, canaries: Canaries, *, is_scaled: bool) -> str:
    """Why nobody would compute a request that came now, and what helps; empty = somebody would.

    Where workers are `is_scaled`, a pool may sleep on purpose: the next request wakes it, and those
    that come while it wakes up wait for that. Who was lost or restarts is away, however soon
    another one takes its place: nobody knows how long it loads.
    """
    pool = [
        slot
        for slot in fleet
        if slot.next_role in DECODING and (slot.leaving is None or slot.leaving.comes_back)
    ]
    if any(slot.is_ready and slot.leaving is None for slot in pool):
        return ""
    if is_scaled and (not pool or any(_wakes_up(slot) for slot in pool)):
        return ""
    names = {slot.name for slot in pool}
    states = [one for one in worker_states(now, fleet, canaries) if one.name in names]
    return f"no worker that decodes is ready: {awaited(states, fleet.config)}"


def _wakes_up(slot: Slot) -> bool:
    """Whether nobody has been ready or lost in this place."""
    return slot.ready is None and not slot.num_short_lives


def awaited(workers: Iterable[WorkerState], config: ClusterConfig) -> str:
    """Which workers are not ready, what each is about and what helps, for people; empty = all are
    ready.
    """
    workers = list(workers)
    if not workers:
        return f"none is there; {_remedy(config)}"
    return ", ".join(
        f"{worker.name} {worker.stage or _pause(worker)}"
        for worker in workers
        if worker.phase is not WorkerPhase.READY
    )


def _remedy(config: ClusterConfig) -> str:
    """For whoever waits and has no worker that starts."""
    if config.listen and not config.on:
        return f"start one: headrace worker --connect {config.listen} --secret-file FILE"
    return "none will be started, so restart the server"


def _pause(worker: WorkerState) -> str:
    if worker.restart_in_s is None:
        return "ends what it has begun"
    why = f", {worker.fault}" if worker.fault else ""
    return f"starts in {worker.restart_in_s:.0f} s{why}"
