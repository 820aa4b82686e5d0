"""LiveEngine: drives one EngineCore under the real clock.

One thread owns the core. Everything that happens, from whatever thread, goes through its inbox;
each event is stamped with the monotonic clock, handed to the core, and the effects are carried out
before the next event is looked at.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

from headrace.adapters.executors.port import Executor
from headrace.core.base.errors import InvariantError, OverloadError
from headrace.core.base.events import (
    Admitted,
    Arrive,
    CallAt,
    Cancel,
    CopyDone,
    Emit,
    EngineEffect,
    EngineEvent,
    Finish,
    Preempted,
    Reject,
    StartCopy,
    StartStep,
    StepDone,
    StepFailed,
    Timer,
)
from headrace.core.base.plan import StepPlan
from headrace.core.base.request import FinishReason, SeqSpec
from headrace.core.base.types import NS_PER_S, Ns, SeqId
from headrace.core.config.schema import WorkerConfig
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.engine.build import build_worker
from headrace.core.engine.stats import EngineStats
from headrace.live.event_log import EventLogWriter, LogHeader

_log = logging.getLogger(__name__)

Sink = Callable[[EngineEffect], None]
Observer = Callable[[Ns, EngineEvent, Sequence[EngineEffect]], None]

# An idle engine checks itself once, but not in the way of a request that follows at once.
IDLE_CHECK_AFTER_S = 0.25

RETRY_AFTER_S = 5.0  # what a client is told that comes while the engine drains or has failed


@dataclass(frozen=True, slots=True)
class _Submit:
    seqs: tuple[SeqSpec, ...]
    sink: Sink


@dataclass(frozen=True, slots=True)
class _Check:
    done: "Future[None]"


@dataclass(frozen=True, slots=True)
class _Drain:
    done: "Future[None]"


@dataclass(frozen=True, slots=True)
class _Close:
    pass


_Message = _Submit | _Check | _Drain | _Close | Cancel | StepDone | StepFailed | CopyDone


class LiveEngine:
    """A running engine. It owns its executor and closes it. All public methods may be called from
    any thread.

    A fault of the executor fails its step, and the core decides what that means. A fault of the
    core fails the engine: every living sequence ends with FinishReason.ERROR, later ones are
    refused, `failure` says why, and the event log is on disk.
    """

    def __init__(
        self,
        config: WorkerConfig,
        executor: Executor,
        *,
        event_log: Path | None = None,
        cost: FittedCostModel | None = None,
    ) -> None:
        cost = FittedCostModel.prior() if cost is None else cost
        self._core = build_worker(config, executor.spec, cost)
        self._executor = executor
        header = LogHeader(config=config, spec=executor.spec, cost=cost)
        self._event_log = None if event_log is None else EventLogWriter(event_log, header)
        self._observers: tuple[Observer, ...] = ()
        self._stats = self._core.stats()
        self._failure: str | None = None
        self._seq_ids = count()
        self._gate = (
            threading.Lock()
        )  # over _is_closed, _is_draining and the order of messages around them
        self._is_closed = False
        self._is_draining = False
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        # The rest belongs to the engine thread.
        self._now = Ns(0)
        self._sinks: dict[SeqId, Sink] = {}
        self._timers: list[tuple[Ns, int]] = []
        self._is_step_running = False
        self._is_refusing = False
        self._is_ending = False
        self._is_check_due = False
        self._drains: list[Future[None]] = []
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)
        self._thread.start()

    # ---- any thread

    @property
    def failure(self) -> str | None:
        """Why the engine has stopped for good; None while it works."""
        return self._failure

    @property
    def is_accepting(self) -> bool:
        return not (self._is_draining or self._is_closed or self._failure)

    def next_seq_ids(self, n: int) -> range:
        """`n` sequence ids that nobody else gets."""
        with self._gate:
            first = next(self._seq_ids)
            self._seq_ids = count(first + n)
        return range(first, first + n)

    def submit(self, specs: Sequence[SeqSpec], sink: Sink) -> None:
        """Let sequences arrive together. `sink` hears Admitted, Emit, Preempted, Finish and Reject
        of each of them.

        It is called on the engine thread, one call after another, so it must be quick. An engine
        that drains or has failed rejects with status 503; a closed one raises OverloadError.
        """
        with self._gate:
            if not self._is_closed:
                self._inbox.put(_Submit(tuple(specs), sink))
                return
        raise OverloadError("the engine is closed", retry_after_s=RETRY_AFTER_S)

    def cancel(self, seq_id: SeqId) -> None:
        """End a sequence at the next step border. Idempotent; unknown ids are fine."""
        self._inbox.put(Cancel(seq_id))

    def stats(self) -> EngineStats:
        """As of the last event."""
        return self._stats

    def observe(self, callback: Observer) -> None:
        """Call `callback(now, event, effects)` on the engine thread after each event, when all
        sinks have heard.

        Refusals and failures that are the engine's own, not the core's, are shown as effects too.
        """
        with self._gate:
            self._observers += (callback,)

    def check(self) -> None:
        """Check every law of the core between two events. Raises InvariantError, also where it was
        broken before.
        """
        done: Future[None] = Future()
        with self._gate:
            is_closed = self._is_closed
            if not is_closed:
                self._inbox.put(_Check(done))
        if is_closed:
            self._thread.join()
            self._check(done)
        done.result()

    def drain(self, timeout_s: float) -> bool:
        """Refuse new sequences, wait until those that live have ended; False = some still live."""
        done: Future[None] = Future()
        with self._gate:
            self._is_draining = True
            if self._is_closed:
                return True
            self._inbox.put(_Drain(done))
        try:
            done.result(timeout_s)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Cancel what lives, wait for the running step, join the thread, close executor and log.
        Idempotent.
        """
        with self._gate:
            is_first = not self._is_closed
            self._is_closed = True
            if is_first:
                self._inbox.put(_Close())
        self._thread.join()
        if is_first:
            self._executor.close()
            if self._event_log is not None:
                self._event_log.close()

    # ---- engine thread: the loop

    def _run(self) -> None:
        while not (self._is_ending and (self._failure or not self._is_step_running)):
            while self._timers and self._timers[0][0] <= time.monotonic_ns():
                self._handle(Timer(heappop(self._timers)[1]))
            try:
                self._receive(self._inbox.get(timeout=self._timeout_s()))
            except queue.Empty:
                self._check_idle()
                continue
            if not self._sinks:
                for waiting in self._drains:
                    waiting.set_result(None)
                self._drains.clear()

    def _receive(self, message: _Message) -> None:
        match message:
            case _Submit(seqs, sink):
                self._submit(seqs, sink)
            case _Check(done):
                self._check(done)
            case _Drain(done):
                self._is_refusing = True
                self._drains.append(done)
            case _Close():
                self._is_refusing = self._is_ending = True
                for seq_id in list(self._sinks):
                    self._handle(Cancel(seq_id))
            case _:
                self._handle(message)

    def _timeout_s(self) -> float | None:
        """Seconds until there is something to do without a message; None = never."""
        timeout_s = IDLE_CHECK_AFTER_S if self._is_check_due else None
        if self._timers:
            due_s = max(0, self._timers[0][0] - time.monotonic_ns()) / NS_PER_S
            timeout_s = min(due_s, timeout_s or 3600.0)
        return timeout_s

    def _tick(self) -> Ns:
        # Strictly increasing, so that a simulation of the log meets the events in this order too.
        self._now = Ns(max(self._now + 1, time.monotonic_ns()))
        return self._now

    def _submit(self, seqs: tuple[SeqSpec, ...], sink: Sink) -> None:
        event = Arrive(seqs)
        for spec in seqs:
            self._sinks[spec.seq_id] = sink
        if self._is_refusing or self._failure:
            self._refuse(event)
        else:
            self._handle(event)

    def _refuse(self, event: Arrive) -> None:
        code, message = (
            ("engine_failed", "the engine has failed")
            if self._failure
            else ("draining", "the server is shutting down")
        )
        words = [
            Reject(spec.seq_id, 503, code, message, "retry elsewhere or later", RETRY_AFTER_S)
            for spec in event.seqs
        ]
        self._tell(self._tick(), event, words)

    def _check(self, done: "Future[None]") -> None:
        try:
            if self._failure:
                raise InvariantError(f"the engine has failed: {self._failure}")
            self._core.check()
        except Exception as error:
            done.set_exception(error)
            if not self._failure:
                self._fail(self._tick(), Arrive(()), error)
        else:
            done.set_result(None)

    # ---- engine thread: one event

    def _handle(self, event: EngineEvent) -> None:
        if self._failure:
            return
        now = self._tick()
        try:
            self._turn(now, event)
        except Exception as error:
            # Whatever it was, the core can no longer be trusted.
            self._fail(now, event, error)

    def _turn(self, now: Ns, event: EngineEvent) -> None:
        if isinstance(event, StepDone | StepFailed):
            self._is_step_running = False
        effects: Sequence[EngineEffect] = ()
        try:
            effects = self._core.handle(now, event)
            # The device comes first: it can work while clients are told.
            self._carry_out(effects)
        finally:
            self._record(now, event, effects)
        self._stats = self._core.stats()
        self._tell(now, event, effects)
        is_idle = not (self._sinks or self._is_step_running)
        if is_idle and self._event_log is not None:
            self._event_log.flush()
        self._is_check_due = is_idle

    def _carry_out(self, effects: Sequence[EngineEffect]) -> None:
        for effect in effects:
            match effect:
                case StartStep(plan):
                    self._start_step(plan)
                case CallAt(at_ns, timer_id):
                    heappush(self._timers, (at_ns, timer_id))
                case StartCopy(copy_id):
                    raise InvariantError("no mover to carry out a copy", copy_id=copy_id)
                case _:
                    pass

    def _start_step(self, plan: StepPlan) -> None:
        self._is_step_running = True
        try:
            self._executor.start(plan, self._inbox.put)
        except Exception as error:
            _log.exception("executor could not start step %d", plan.step_id)
            self._inbox.put(StepFailed(plan.step_id, str(error)))

    def _check_idle(self) -> None:
        """The conservation law: when nobody is served, nothing is held."""
        if not self._is_check_due or self._failure:
            return
        self._is_check_due = False
        try:
            self._core.check()
            stats = self._stats
            if stats.num_running or stats.num_waiting or stats.num_pinned_blocks:
                raise InvariantError("idle engine holds something", stats=stats)
        except Exception as error:
            self._fail(self._tick(), Arrive(()), error)

    def _record(self, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]) -> None:
        if self._event_log is None:
            return
        try:
            self._event_log.write(now, event, effects)
        except OSError:
            _log.exception("event log cannot be written; recording ends")
            self._event_log.close()
            self._event_log = None

    # ---- engine thread: words to clients

    def _tell(self, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]) -> None:
        for effect in effects:
            match effect:
                case (
                    Admitted(seq_id)
                    | Emit(seq_id)
                    | Preempted(seq_id)
                    | Finish(seq_id)
                    | Reject(seq_id)
                ):
                    self._say(seq_id, effect)
                case _:
                    pass
        for observer in self._observers:
            try:
                observer(now, event, effects)
            except Exception:
                _log.exception("observer failed")

    def _say(self, seq_id: SeqId, effect: EngineEffect) -> None:
        sink = self._sinks.get(seq_id)
        if sink is None:
            raise InvariantError(
                "word about a sequence that does not live", seq_id=seq_id, effect=effect
            )
        if isinstance(effect, Finish | Reject):
            del self._sinks[seq_id]
        try:
            sink(effect)
        except Exception:
            _log.exception("sink of sequence %d failed; the sequence is cancelled", seq_id)
            if seq_id in self._sinks:
                self._sinks[seq_id] = _ignore
                self._inbox.put(Cancel(seq_id))

    def _fail(self, now: Ns, event: EngineEvent, error: Exception) -> None:
        _log.critical("engine has failed", exc_info=error)
        self._failure = f"{type(error).__name__}: {error}"
        if self._event_log is not None:
            self._event_log.flush()
        words = [
            Finish(
                seq_id,
                FinishReason.ERROR,
                0,
                0,
                0,
                0,
                error=f"the engine has failed: {self._failure}",
            )
            for seq_id in list(self._sinks)
        ]
        self._tell(now, event, words)


def _ignore(effect: EngineEffect) -> None:
    """The sink of a sequence whose own sink has failed."""
