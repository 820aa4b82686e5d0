"""ClusterEngine: drives a FrontCore under the real clock, over workers in processes of their own.

It is to a server what a LiveEngine is: sequences come in, words come out. One thread owns the core
and the crew; everything that happens reaches it through one inbox or through the workers' sockets.
What it hears it tells at once, so sinks and observers must be quick.
"""

import logging
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from headrace.cluster import wire
from headrace.cluster.audit import Audit
from headrace.cluster.autoscale import Autoscaling, MakeScaler
from headrace.cluster.crew import Crew, Progress
from headrace.cluster.door import Door
from headrace.cluster.fleet import Fleet
from headrace.cluster.roles import SetWorkerRole
from headrace.cluster.rolling import RollingRestart
from headrace.cluster.states import absence, worker_states
from headrace.cluster.switchboard import Speaker
from headrace.core.base.errors import ConfigError, InvariantError
from headrace.core.base.events import Arrive, CallAt, Cancel, EngineEffect
from headrace.core.base.request import FinishReason, SeqSpec, Slo
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from headrace.core.engine.stats import EngineStats
from headrace.core.router.core import RouterCore
from headrace.core.router.decision import Decision
from headrace.core.router.events import Resync
from headrace.core.router.front import FrontCore
from headrace.core.router.front_events import EndAll, Forward, FrontEvent
from headrace.core.telemetry import ClusterTelemetry
from headrace.core.workload.recording import PoolFacts
from headrace.live.intake import Intake
from headrace.live.listeners import Sink
from headrace.live.messages import Asked, Call, Check, Close, Drain, Submit
from headrace.live.port import PoolStatus, WorkerState

_log = logging.getLogger(__name__)

LONGEST_WAIT_NS: Final = 3600 * NS_PER_S
NAP_NS: Final = NS_PER_S // 2  # so late, the thread was stopped, not at work
NO_LIMITS: Final = Slo()
NOTHING: Final = Arrive(())  # stands for the event where a worker speaks


@dataclass(frozen=True, slots=True)
class Restart:
    """All workers, one after another."""


class ClusterEngine(Intake[Restart | SetWorkerRole]):
    """A running cluster. It owns its workers' processes and ends them. All public methods may be
    called from any thread.
    """

    def __init__(
        self,
        config: ClusterConfig,
        fleet: Fleet,
        router: RouterCore,
        *,
        door: Door | None = None,
        on_progress: Progress | None = None,
        drain_timeout_s: float = 30.0,
        scaler: MakeScaler | None = None,
        slo: Slo = NO_LIMITS,
    ) -> None:
        """`door` is where workers of other machines come in, if they may. A worker that leaves has
        `drain_timeout_s` for what it has begun; the rest goes on elsewhere. A `scaler` decides how
        many workers there are; for it `slo` judges requests that state no limits.
        """
        super().__init__(self._ring)
        self._core = FrontCore(router, config)
        self._crew = Crew(
            fleet,
            door,
            self._handle,
            on_progress,
            num_at=self._core.num_at,
            drain_timeout_s=drain_timeout_s,
            renew_s=config.silence_timeout_s / 2,
        )
        self._rolling = RollingRestart(self._crew)
        self._autoscaling: Autoscaling | None = None
        if scaler is not None:
            self._autoscaling = Autoscaling(self._crew, self._core, scaler, slo)
            self._listeners.observe(self._autoscaling.observe)
        self._calls: list[partial[None]] = []  # to be made outside the lock
        self._start(self._run, "headrace-cluster")

    # ---- any thread

    def wait_ready(self, timeout_s: float) -> list[wire.Ready] | None:
        """What each worker serves with, once all of them have been ready; None = not within that
        time. ConfigError where one cannot serve.
        """
        try:
            return self._crew.start.result(timeout_s)
        except TimeoutError:
            return None

    def stats(self) -> EngineStats:
        """Of all workers together, as last heard; what waits for a worker included."""
        with self._turn:
            stats = self._crew.fleet.stats()
            return msgspec.structs.replace(
                stats,
                num_waiting=stats.num_waiting + self._core.num_unrouted,
                num_migrations=self._core.num_migrations,
                num_handoffs=self._core.num_handoffs,
                num_recalls=self._core.num_recalls,
            )

    def workers(self) -> list[WorkerState]:
        with self._turn:
            now = Ns(time.monotonic_ns())
            return worker_states(now, self._crew.fleet, self._crew.canaries)

    def absence(self) -> str:
        scaling = self._autoscaling
        with self._turn:
            return absence(
                Ns(time.monotonic_ns()),
                self._crew.fleet,
                self._crew.canaries,
                is_scaled=scaling is not None and not scaling.has_failed,
            )

    def pools(self) -> list[PoolStatus]:
        with self._turn:
            return self._autoscaling.pools() if self._autoscaling else []

    def pool_facts(self) -> tuple[PoolFacts, ...]:
        """Its workers, for a recording of its traffic."""
        with self._turn:
            return self._crew.fleet.pool_facts()

    def decision(self, request_id: str) -> Decision | None:
        with self._turn:
            return self._core.decision(request_id)

    def telemetry(self, default_slo: Slo) -> ClusterTelemetry:
        """As Engine.telemetry, for one reader at most."""
        telemetry = ClusterTelemetry(default_slo)
        self._crew.on_record = telemetry.tell
        return telemetry

    def check(self) -> None:
        """Check every law here and on every worker that is ready. Raises InvariantError."""
        done: Future[None] = Future()
        if self._post_if_open(Check(done)):
            done.result()

    def restart_workers(self) -> None:
        """Let each worker of this machine end and start again, one after another, while the others
        serve. Returns at once; called again, it begins anew.
        """
        self._post(Restart())

    def set_role(self, worker: str, role: Role) -> Future[None]:
        """As Engine.set_role."""
        done: Future[None] = Future()
        self._post(SetWorkerRole(worker, role, done))
        return done

    def close(self) -> None:
        """End what lives, end the workers, join the thread. Idempotent."""
        self._end()

    def _ring(self) -> None:
        self._crew.switchboard.wake()

    # ---- engine thread

    def _run(self) -> None:
        while not self._is_ending:
            due_ns = self._due_ns()
            timeout_s = max(0.0, (due_ns - time.monotonic_ns()) / NS_PER_S)
            speaking = self._crew.switchboard.wait(timeout_s)
            with self._turn:
                try:
                    self._work(speaking, due_ns)
                except Exception as error:
                    _log.critical("the front end has failed", exc_info=error)
                    self._fail(f"{type(error).__name__}: {error}")
            self._call_all()
        self._crew.end()

    def _work(self, speaking: list[Speaker], due_ns: Ns) -> None:
        late_ns = -max(self._now, due_ns) + self._tick()
        if late_ns > NAP_NS:
            self._crew.fleet.overslept(late_ns)
        self._crew.listen(self._now, speaking)
        while self._inbox:
            self._receive(self._inbox.popleft())
        while (timer := self._timers.pop_due(self._now)) is not None:
            self._handle(timer)
        self._rolling.turn()
        if self._autoscaling is not None and not self._is_ending:
            self._autoscaling.turn(self._now)
        self._crew.settle(is_starting=not (self._is_ending or self._failure))
        if self._crew.fleet.is_hopeless:
            self._fail(f"no worker can be started ({self._crew.faults})")
        if not self._listeners.num_living:
            self._calls += [partial(done.set_result, None) for done in self._drains]
            self._drains.clear()

    def _due_ns(self) -> Ns:
        """When there is something to do, if nobody says anything before."""
        if self._inbox:
            return self._now
        times = (
            self._crew.next_ns(),
            self._timers.next_ns,
            self._autoscaling.next_ns() if self._autoscaling else None,
            Ns(time.monotonic_ns() + LONGEST_WAIT_NS),
        )
        return min(due_ns for due_ns in times if due_ns is not None)

    # ---- the core

    def _handle(self, event: FrontEvent) -> None:
        words: list[EngineEffect] = []
        for effect in self._core.handle(self._now, event):
            match effect:
                case Forward(worker_id, asked):
                    message = (
                        wire.Submit(asked.seqs, self._now) if isinstance(asked, Arrive) else asked
                    )
                    self._crew.send(worker_id, message)
                    if self._autoscaling is not None and isinstance(asked, Arrive):
                        self._autoscaling.sent(worker_id, asked.seqs)
                case Resync(worker_id):
                    self._crew.send(worker_id, wire.SendSnapshot())
                case CallAt():
                    self._timers.add(effect)
                case _:
                    words.append(effect)
        if isinstance(event, Arrive):
            self._listeners.tell(self._now, event, words)
        elif words:
            self._listeners.tell(self._now, NOTHING, words)

    # ---- readers

    def _receive(self, message: Asked | Restart | SetWorkerRole) -> None:
        match message:
            case Submit(seqs, sink):
                self._submit(seqs, sink)
            case Cancel():
                self._handle(message)
            case Call(callback):
                self._calls.append(partial(self._call, callback, self._now))
            case Check(done):
                self._check(done)
            case Restart():
                self._rolling.begin()
            case SetWorkerRole():
                if self._autoscaling is None or self._autoscaling.allows(message):
                    self._crew.roles.ask(message)
            case Drain(done):
                self._is_refusing = True
                self._drains.append(done)
            case Close():
                self._is_refusing = self._is_ending = True
                self._handle(EndAll(FinishReason.CANCELLED))

    def _submit(self, seqs: tuple[SeqSpec, ...], sink: Sink) -> None:
        self._listeners.add(seqs, sink)
        event = Arrive(seqs)
        words = self._refusals(event)
        if words:
            self._listeners.tell(self._now, event, words)
        else:
            self._handle(event)

    def _check(self, done: Future[None]) -> None:
        audit = Audit(done)
        try:
            if self._failure:
                raise InvariantError(f"the engine has failed: {self._failure}")
            self._core.check()
            if self._core.num_living != self._listeners.num_living:
                raise InvariantError("somebody waits for a sequence that does not live")
        except InvariantError as error:
            audit.faults.append(str(error))
        self._crew.audit(audit)

    def _call_all(self) -> None:
        while self._calls:
            self._calls.pop(0)()

    def _fail(self, reason: str) -> None:
        """For good: everybody has an error, and nobody else comes in."""
        if self._failure is not None:
            return
        self._failure = reason
        if not self._crew.start.done():
            self._crew.start.set_exception(ConfigError(reason))
        text = f"the engine has failed: {reason}"
        try:
            self._handle(EndAll(FinishReason.ERROR, text))
        except Exception:
            _log.exception("what is under way is lost")
            self._listeners.end(self._listeners.living(), self._now, NOTHING, text)
