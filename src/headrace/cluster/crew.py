"""The workers as the front end meets them: their sockets and their words, which become events.

Decides when a worker is lost; refuses to know what that means to a request. Belongs to one thread.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

import msgspec

from headrace.cluster import wire
from headrace.cluster.audit import Audit, Audits
from headrace.cluster.canary import Canaries
from headrace.cluster.door import Door, Guest
from headrace.cluster.endings import LAST_BREATH_S, Endings
from headrace.cluster.fleet import Cause, Fleet, Slot
from headrace.cluster.process import WorkerProcess
from headrace.cluster.returns import Returns
from headrace.cluster.roles import RoleChanges
from headrace.cluster.snapshots import Snapshots
from headrace.cluster.stall_watch import StallWatch
from headrace.cluster.switchboard import Speaker, Switchboard
from headrace.core.base.errors import ConfigError, TransferError
from headrace.core.base.types import NS_PER_S, Ns, WorkerId
from headrace.core.engine.stats import EngineStats
from headrace.core.router.events import (
    WorkerDown,
    WorkerDrain,
    WorkerKv,
    WorkerLoad,
    WorkersStarting,
    WorkerStats,
)
from headrace.core.router.front_events import FrontEvent, WorkerSaid
from headrace.core.telemetry import RequestRecord

_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
OnRecord = Callable[[RequestRecord], None]

ENDED: Final = "its process has ended"


class Crew:
    """`handle` is called with what the workers' words mean to a FrontCore; `num_at` says how many
    requests it has at a worker. Who leaves has `drain_timeout_s` for what is in flight there. Those
    that have come by themselves hear of this front end every `renew_s`.
    """

    def __init__(
        self,
        fleet: Fleet,
        door: Door | None,
        handle: Callable[[FrontEvent], None],
        on_progress: Progress | None,
        *,
        num_at: Callable[[WorkerId], int],
        drain_timeout_s: float,
        renew_s: float,
    ) -> None:
        self.fleet = fleet
        self._door = door
        self.switchboard = Switchboard()
        self.switchboard.follow(Ns(0), fleet, door)
        # Until every worker has been ready once: what each of them serves with.
        self.start: Future[list[wire.Ready]] = Future()
        self._handle = handle
        self._on_progress = on_progress
        self._num_at = num_at
        self._drain_ns = Ns(round(drain_timeout_s * NS_PER_S))
        self._renew_ns = Ns(round(renew_s * NS_PER_S))
        self._renewed_ns = Ns(0)
        self._now = Ns(0)
        self._to_lose: dict[WorkerProcess, tuple[Slot, Cause, str]] = {}  # lives, and why
        self._drained: list[Slot] = []
        self._endings = Endings()
        self._num_starting = 0  # as was told
        self._audits = Audits()
        self.canaries = Canaries(fleet.config, self._send)
        self.roles = RoleChanges(fleet, self._send, handle)
        self._returns = Returns(fleet)
        self._snapshots = Snapshots()
        self._stall_watch = StallWatch(fleet, handle)
        self.on_record: OnRecord = lambda record: None

    @property
    def faults(self) -> str:
        """Why each worker was lost, last."""
        return "; ".join(f"{slot.name}: {slot.fault}" for slot in self.fleet if slot.fault)

    # ---- the loop

    def listen(self, now: Ns, speaking: list[Speaker]) -> None:
        """Hear those that have said something, and let in those who may."""
        self._now = now
        for speaker in speaking:
            match speaker:
                case Door():
                    speaker.accept(now)
                case Guest():
                    self._meet(speaker)
                case Slot(process=process) if process is not None:
                    self._read(speaker, process)

    def _read(self, slot: Slot, process: WorkerProcess) -> None:
        try:
            for message in process.receive():
                self._hear(slot, message)
        except EOFError:
            self._give_up(slot, Cause.ENDED, ENDED)
        except wire.OtherProtocol as error:
            self._turn_away(slot, Cause.MISFIT, error.message)
        except TransferError as error:
            self._give_up(slot, Cause.CONNECTION, str(error))

    def _give_up(self, slot: Slot, cause: Cause, reason: str) -> None:
        """This life of it is lost; the first reason counts."""
        assert slot.process is not None
        self._to_lose.setdefault(slot.process, (slot, cause, reason))

    def _turn_away(self, slot: Slot, cause: Cause, reason: str) -> None:
        """The same, and whoever came by itself need not come again as it is."""
        self._send(slot, wire.Dismiss(reason))
        self._give_up(slot, cause, reason)

    def _meet(self, guest: Guest) -> None:
        assert self._door is not None
        worker = self._door.listen(guest)
        if worker is None:
            return
        slot = self.fleet.let_in(self._now, *worker)
        if slot is None:
            _log.warning("a worker has come for whom nobody waits")
            worker[0].close()
        else:
            _log.info("worker %s has come", slot.name)

    def settle(self, *, is_starting: bool) -> None:
        """Give up those that are lost, end those that have nothing to do any more, start those
        whose time has come, and follow them all.
        """
        for slot in self.fleet.silent(self._now):
            self._give_up(slot, Cause.SILENT, "it has fallen silent")
        for slot, cause, reason in self.canaries.turn(self._now, self.fleet):
            self._turn_away(slot, cause, reason)
        while self._to_lose:
            process, (slot, cause, reason) = self._to_lose.popitem()
            if slot.process is process:
                self._lose(slot, cause, reason)
        self._stall_watch.turn(self._now)
        self._end_leaving()
        self._end_start()
        if is_starting:
            try:
                for slot in self.fleet.start_due(self._now):
                    _log.info("worker %s is started", slot.name)
            except OSError as error:
                _log.error("a worker cannot be started: %s", error)
        if self._door is not None:
            self._door.close_late()
        self._renew()
        self.switchboard.follow(self._now, self.fleet, self._door)
        self._endings.turn(self._now)
        if self._num_starting != self.fleet.num_starting:
            self._num_starting = self.fleet.num_starting
            self._handle(WorkersStarting(self._num_starting))

    def _renew(self) -> None:
        """Workers of other machines cannot see otherwise that nobody is there any more."""
        if self._now < self._renewed_ns + self._renew_ns:
            return
        self._renewed_ns = self._now
        for slot in self.fleet:
            if slot.is_remote and slot.process is not None:
                self._send(slot, wire.Renew())

    def next_ns(self) -> Ns | None:
        """When there is something to do without a word from anybody; None = never."""
        has_remote = any(slot.is_remote for slot in self.fleet)
        times = (
            self.fleet.next_ns(),
            self.canaries.next_ns(),
            self._endings.next_ns(self._now),
            self._stall_watch.next_ns,
            Ns(self._renewed_ns + self._renew_ns) if has_remote else None,
            self._door.rests_until(self._now) if self._door is not None else None,
        )
        return min((time for time in times if time is not None), default=None)

    def send(self, worker_id: WorkerId, message: wire.ToWorker) -> None:
        """To a worker that may be lost by now, or turn out to be."""
        slot = self.fleet.of_worker(worker_id)
        if slot is not None:
            self._send(slot, message)

    def audit(self, audit: Audit) -> None:
        """Have every worker that is ready check itself."""
        asked = [slot for slot in self.fleet if slot.is_ready]
        audit_id = self._audits.begin(audit, [slot.name for slot in asked])
        for slot in asked:
            self._send(slot, wire.Audit(audit_id))

    def leave(self, slot: Slot, *, comes_back: bool = False, within_ns: Ns | None = None) -> None:
        """Nothing goes there any more. When nothing is in flight there its process ends, and
        another one begins where it is to come back; what then still is, goes on elsewhere.
        """
        _log.info("worker %s is drained", slot.name)
        drain_ns = self._drain_ns if within_ns is None else min(self._drain_ns, within_ns)
        self.fleet.leave(slot, Ns(self._now + drain_ns), comes_back=comes_back)
        if slot.worker_id is not None:
            self._handle(WorkerDrain(slot.worker_id))

    def end(self) -> None:
        """Let all processes end, and see to it that they do."""
        if self._door is not None:
            self._door.close()
        self._endings.end_all(slot.process for slot in self.fleet if slot.process is not None)
        self.switchboard.close()

    # ---- words

    def _hear(self, slot: Slot, message: wire.FromWorker) -> None:
        if isinstance(message, wire.Beat):
            self.fleet.heard(slot, self._now, message.stats, message.cost)
            if message.stats is not None:
                self.canaries.note(self._now, slot, message.stats)
        else:
            self.fleet.heard(slot, self._now, None)
        match message:
            case wire.Loading(stage, done, total):
                self.fleet.loads(slot, stage, done, total)
                if self._on_progress is not None and slot.num_starts == 1:
                    self._on_progress(stage, done, total)
            case wire.Ready():
                self._welcome(slot, message)
            case wire.Unfit(text, hint):
                # One of another machine keeps nobody else from serving.
                if not (self.start.done() or (slot.is_remote and len(list(self.fleet)) > 1)):
                    self.start.set_exception(ConfigError(text, hint=hint))
                self._give_up(slot, Cause.UNFIT, text)
            case wire.Failed(reason):
                self._give_up(slot, Cause.ENGINE_FAILED, f"its engine has failed: {reason}")
            case wire.Audited(audit_id, fault):
                self._audits.hear(audit_id, slot.name, fault)
            case wire.Canaried():
                self._hear_canary(slot, message)
            case wire.Leave(within_s):
                if slot.leaving is None:
                    # One that this front end has sent for is sent for again.
                    within_ns = Ns(round(within_s * NS_PER_S))
                    self.leave(slot, comes_back=not slot.is_remote, within_ns=within_ns)
            case wire.RoleIs() | wire.RoleWanted() | wire.RoleSettled():
                self.roles.hear(slot, message)
            case wire.Hello():
                raise TransferError("a worker says hello once")
            case _ if slot.worker_id is None:
                pass  # it beats while it loads
            case wire.Turn():
                self._hear_turn(slot.worker_id, message)
            case wire.Beat(stats, num_received):
                if stats is not None:
                    load = WorkerLoad.of(stats, stats.full_step_ns)
                    self._handle(WorkerStats(slot.worker_id, load, num_received))
                    self._ask_whether_drained(slot, slot.worker_id, stats)
            case wire.Snapshot():
                self._hear_snapshot(slot, slot.worker_id, message)

    def _hear_snapshot(self, slot: Slot, worker_id: WorkerId, part: wire.Snapshot) -> None:
        assert slot.ready is not None
        whole = self._snapshots.hear(worker_id, part, slot.ready.spec.num_blocks)
        if whole is not None:
            self._handle(whole)

    def _hear_turn(self, worker_id: WorkerId, turn: wire.Turn) -> None:
        for record in turn.records:
            self.on_record(record)
        if turn.kv:
            self._handle(WorkerKv(worker_id, turn.kv_no, turn.kv))
        if turn.load is not None:
            self._handle(WorkerStats(worker_id, turn.load, turn.num_received))
        if turn.words:
            self._handle(WorkerSaid(worker_id, turn.words))

    def _welcome(self, slot: Slot, ready: wire.Ready) -> None:
        if misfit := self._misfit(ready):
            self._turn_away(slot, Cause.MISFIT, misfit)
            return
        self.fleet.loaded(slot, ready)
        if not self.canaries.begin(self._now, slot, ready):
            self._let_serve(slot, ready)

    def _misfit(self, ready: wire.Ready) -> str:
        """Why it could not take over from the others; empty = it could."""
        others = [one.ready for one in self.fleet if one.ready is not None and one.is_ready]
        if not others and self.start.done():
            others = self.start.result()
        other = others[0] if others else None
        if other is not None and other.kind != ready.kind:
            return f"it serves {ready.kind}, the others {other.kind}"
        return ""

    def _hear_canary(self, slot: Slot, answer: wire.Canaried) -> None:
        match self.canaries.hear(self._now, slot, answer):
            case wire.Ready() as ready if misfit := self._misfit(ready):
                self._turn_away(slot, Cause.MISFIT, misfit)
            case wire.Ready() as ready:
                self._let_serve(slot, ready)
                # What it has cached by then.
                self._send(slot, wire.SendSnapshot())
            case (cause, reason):
                self._turn_away(slot, cause, reason)

    def _let_serve(self, slot: Slot, ready: wire.Ready) -> None:
        up = wire.up_of(self.fleet.is_up(slot, self._now, ready), slot.name, ready)
        self._handle(msgspec.structs.replace(up, role=slot.role))  # as it has said since
        _log.info("worker %s is ready", slot.name)
        self._returns.back(self._now, slot)
        self._end_start()

    def _end_start(self) -> None:
        if not self.start.done() and (lives := self.fleet.lives(self._now)):
            self.start.set_result(lives)

    # ---- sockets

    def _send(self, slot: Slot, message: wire.ToWorker) -> None:
        assert slot.process is not None
        try:
            slot.process.send(message)
        except TransferError as error:
            self._give_up(slot, Cause.CONNECTION, str(error))

    def _lose(self, slot: Slot, cause: Cause, reason: str) -> None:
        assert slot.process is not None
        if reason == ENDED and slot.process.wait(LAST_BREATH_S):
            reason = f"{reason}, with {slot.process.exit_status()}"
        worker_id = slot.worker_id
        self._endings.add(slot.process, self._now, 0.0)
        self.fleet.lose(slot, self._now, cause, reason)
        # What nobody could serve with, whoever waits for the start is told.
        if not (self.start.done() and self.start.exception()):
            wait_s = self.fleet.restart_in_s(slot, self._now)
            next_one = f"; another one starts in {wait_s:g} s" if wait_s else ""
            _log.warning("worker %s is lost: %s%s", slot.name, slot.fault, next_one)
        self._is_down(slot, worker_id, slot.fault, is_failure=True)

    def _is_down(
        self, slot: Slot, worker_id: WorkerId | None, reason: str, *, is_failure: bool
    ) -> None:
        self._returns.away(self._now, slot, reason, is_failure=is_failure)
        self._audits.lose(slot.name)
        self.roles.lose(slot)
        if worker_id is not None:
            self._snapshots.lose(worker_id)
            self._handle(WorkerDown(worker_id, reason, is_failure))

    # ---- those that leave

    def _ask_whether_drained(self, slot: Slot, worker_id: WorkerId, stats: EngineStats) -> None:
        """By its own word, which came after all that it had to say before."""
        if slot.leaving and not self._num_at(worker_id) and not stats.num_lent_blocks:
            self._drained.append(slot)

    def _end_leaving(self) -> None:
        drained, self._drained = self._drained, []
        for slot in list(self.fleet):
            if slot.leaving is None:
                continue
            is_late = self._now >= slot.leaving.until_ns
            if is_late or not slot.is_ready or any(slot is one for one in drained):
                self._end_life(slot, is_late=is_late)

    def _end_life(self, slot: Slot, *, is_late: bool) -> None:
        worker_id, process = slot.worker_id, slot.process
        if process is not None:
            # What is still in flight goes on elsewhere, so it may not go on here.
            end = process.kill if is_late else process.close
            end()
            self._endings.add(process, self._now)
        self.fleet.end(slot, self._now)
        _log.info("worker %s has ended", slot.name)
        self._is_down(slot, worker_id, "it was asked to leave", is_failure=False)
