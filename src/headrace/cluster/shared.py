"""The one engine of a worker, for all front ends that it works for.

The first front end that comes says what it serves with, and later ones must ask for the same. The
engine outlives them: who comes again finds what is cached. Decides when an engine is booted and
given up; refuses to know over what a front end speaks.
"""

import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from headrace.cluster.agreement import SHARED_SECTIONS, differences
from headrace.cluster.ballot import RoleBallot
from headrace.cluster.session import Session
from headrace.cluster.wire import (
    Audit,
    Audited,
    Canary,
    Configure,
    Dismiss,
    Failed,
    FromWorker,
    Loading,
    Ready,
    Renew,
    RoleVote,
    SendSnapshot,
    SetRole,
    Submit,
    ToWorker,
    snapshot_parts,
)
from headrace.cluster.worker_line import WorkerLine
from headrace.core.base.errors import ConfigError, HeadraceError, TransferError
from headrace.core.base.events import (
    Arrive,
    BlocksStored,
    Cancel,
    Computed,
    EndLease,
    EngineEffect,
    EngineEvent,
    Expect,
    KvChange,
    KvChanged,
)
from headrace.core.base.request import Slo
from headrace.core.base.types import Ns
from headrace.core.base.worker import Role
from headrace.core.config.resolve import MachineFacts
from headrace.core.config.schema import Config
from headrace.core.telemetry import Counters, Telemetry
from headrace.live.boot import AsWorker, Booted, Progress, boot
from headrace.live.machine import machine_facts

_log = logging.getLogger(__name__)


class Occupied(HeadraceError):
    """The engine serves others with something else."""


class Worker:
    """Tells each front end what its engine does, turn by turn, and does what they say."""

    def __init__(self, asked: Configure, booted: Booted) -> None:
        self.asked = asked
        self._ballot = RoleBallot[Session](asked.role, _tell)  # of the engine thread
        self._booted = booted
        self._engine = booted.engine
        self._telemetry = Telemetry(Slo(), booted.engine.cost)
        self._counters = Counters()
        self._kv_no = 0  # of the next change of the cache
        self._cached: dict[bytes, None] = {}  # names of cached blocks, oldest first
        self._sessions: list[Session] = []  # of the engine thread
        self._engine.observe(self._observe)

    @property
    def role(self) -> Role:
        """What it is for: what front ends send it. What it computes does not depend on it."""
        return self._ballot.role

    @property
    def has_failed(self) -> bool:
        return self._engine.failure is not None

    def differences(self, asked: Configure) -> list[str]:
        """What would have to be alike for its engine to serve what is asked, and is not."""
        return differences(asked.config, self.asked.config, self._booted.resolution)

    def open(self, asked: Configure, line: WorkerLine) -> Session:
        """The front end at this line hears what the engine does from some turn on."""
        session = Session(line, self._engine, self._booted.step_fit)
        self._engine.call_soon(lambda now: self._join(asked, session))
        return session

    def _join(self, asked: Configure, session: Session) -> None:
        """With all that is cached, after which no change is left out."""
        if self._engine.failure is not None:
            _tell(session, Failed(self._engine.failure))
            return
        booted = self._booted
        shared = {section: getattr(booted.config, section) for section in SHARED_SECTIONS}
        ready = Ready(
            pid=os.getpid(),
            spec=booted.spec,
            config=replace(asked.config, **shared),
            kv=booted.kv,
            kv_address=booted.kv_address,
            role=self.role,
            cost=booted.engine.cost,
            description=booted.loaded.description,
        )
        _tell(session, ready)
        if self._kv_no:
            self._send_snapshot(session)
        session.is_joined = True
        self._sessions.append(session)
        self._ballot.join(session)

    def end(self, session: Session) -> None:
        """The front end is gone."""
        session.end()
        self._engine.call_soon(lambda now: self._leave(session))

    def _leave(self, session: Session) -> None:
        with suppress(ValueError):  # the engine has failed, and all have left
            self._sessions.remove(session)
        self._ballot.leave(session)

    # ---- the front ends' words, on the threads that receive them

    def obey(self, session: Session, message: ToWorker) -> None:
        match message:
            case Submit(seqs, sent_ns):
                session.submit(seqs, sent_ns)
            case Cancel():
                session.cancel(message)
            case EndLease():
                session.end_lease(message)
            case Expect():
                session.expect(message)
            case Computed():
                session.tell_computed(message)
            case SendSnapshot():
                self._engine.call_soon(lambda now: self._send_snapshot(session))
            case SetRole(role):
                self._engine.call_soon(lambda now: self._ballot.ask(session, role))
            case RoleVote(vote_id, agrees):
                self._engine.call_soon(
                    lambda now: self._ballot.hear(session, vote_id, agrees=agrees)
                )
            case Audit(audit_id):
                threading.Thread(target=self._audit, args=(session, audit_id), daemon=True).start()
            case Canary():
                session.answer(message)
            case Renew():
                pass  # it was heard
            case Dismiss(reason):
                raise ConfigError(f"the front end does not want this worker: {reason}")
            case Configure():
                raise TransferError("a worker is configured once")

    def _audit(self, session: Session, audit_id: int) -> None:
        fault = ""
        try:
            self._engine.check()
            self._counters.check()
        except HeadraceError as error:
            fault = str(error)
        _tell(session, Audited(audit_id, fault))

    # ---- the engine's words, on the engine thread

    def _observe(self, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]) -> None:
        if self._engine.failure is not None:
            # Its last words are not for clients: others will compute what it could not.
            while self._sessions:
                _tell(self._sessions.pop(), Failed(self._engine.failure))
            return
        self._counters.observe(event, effects)
        records = self._telemetry.observe(now, event, effects)
        first_no = self._kv_no
        changes = self._note_changes(effects)
        for session in self._sessions:
            if isinstance(event, Arrive) and event.seqs:
                session.note_arrival(event.seqs[0].seq_id)
            elif isinstance(event, Expect):
                session.note_arrival(event.seq_id)
            turn = session.turn(now, records, first_no, changes)
            if turn is not None:
                _tell(session, turn)

    def _note_changes(self, effects: Sequence[EngineEffect]) -> tuple[KvChange, ...]:
        changes: list[KvChange] = []
        for effect in effects:
            if isinstance(effect, KvChanged):
                changes += effect.changes
        for change in changes:
            if isinstance(change, BlocksStored):
                self._cached.update(dict.fromkeys(change.names))
            else:
                for name in change.names:
                    del self._cached[name]
        self._kv_no += len(changes)
        return tuple(changes)

    def _send_snapshot(self, session: Session) -> None:
        for part in snapshot_parts(self._kv_no, self._cached):
            _tell(session, part)

    def close(self) -> None:
        self._booted.close()


def _tell(session: Session, message: FromWorker) -> None:
    with suppress(OSError):  # whoever receives finds out, and ends the session
        session.line.send(message)


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A front end that has its part of an engine."""

    worker: Worker
    session: Session

    def obey(self, message: ToWorker) -> None:
        self.worker.obey(self.session, message)

    def beat(self) -> None:
        self.session.beat()


class Boot(Protocol):
    """As `live.boot.boot`."""

    def __call__(
        self,
        config: Config,
        *,
        machine: MachineFacts,
        on_progress: Progress,
        worker: AsWorker,
    ) -> Booted: ...


class SharedEngine:
    """All methods may be called from any thread."""

    def __init__(self, as_worker: AsWorker, boot: Boot = boot) -> None:
        self._as_worker = as_worker
        self._boot = boot
        self._lock = threading.Lock()  # over all that follows, also while an engine boots
        self._worker: Worker | None = None
        self._last_role: Role | None = None  # of the engine before this one
        self._members: set[Member] = set()

    @property
    def role(self) -> Role | None:
        """What the worker is for; None = what it began as."""
        worker = self._worker
        return self._last_role if worker is None else worker.role

    def enter(self, asked: Configure, line: WorkerLine, kv_host: str) -> Member:
        """The engine that a front end asks for, which it has until it leaves. ConfigError where
        nobody can serve so, Occupied where others are served with something else.
        """
        with self._lock:
            worker = self._fitting(asked)
            if worker is None:
                as_worker = replace(self._as_worker, kv_host=kv_host)
                worker = self._worker = _booted(asked, line, as_worker, self._boot)
            member = Member(worker, worker.open(asked, line))
            self._members.add(member)
            return member

    def _fitting(self, asked: Configure) -> Worker | None:
        worker = self._worker
        if worker is None:
            return None
        if worker.has_failed:
            for member in self._members:
                member.session.line.cut()
        else:
            different = worker.differences(asked)
            if different and self._members:
                raise Occupied(
                    f"this worker serves another front end with {'; '.join(different)}",
                    hint="front ends with workers in common need the same model, device, kv and"
                    " scheduler settings",
                )
            # What is recorded of its steps is for the first one to say.
            is_same = asked.config.telemetry == worker.asked.config.telemetry
            if self._members or (is_same and not different):
                return worker
        self._last_role, self._worker = worker.role, None
        worker.close()
        return None

    def leave(self, member: Member) -> None:
        """The front end is gone."""
        with self._lock:
            self._members.remove(member)
        member.worker.end(member.session)

    def close(self) -> None:
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


def _booted(asked: Configure, line: WorkerLine, as_worker: AsWorker, boot: Boot) -> Worker:
    def report(stage: str, done: int, total: int) -> None:
        with suppress(OSError):  # others may want what loads, if it does not any more
            line.send(Loading(stage, done, total))

    booted = boot(
        asked.config,
        machine=shared_facts(asked.num_sharing),
        on_progress=report,
        worker=as_worker,
    )
    booted.loaded.close()  # the text is the front ends'
    return Worker(asked, booted)


def shared_facts(num_sharing: int) -> MachineFacts:
    """What one of several equal workers may use of this machine."""
    facts = machine_facts()
    return replace(
        facts,
        num_cores=max(1, facts.num_cores // num_sharing),
        available_bytes=facts.available_bytes // num_sharing,
    )
