"""LiveEngine: drives one EngineCore under the real clock.

Everything that happens, from whatever thread, goes through one inbox. Whoever holds the turn
empties it: each event is stamped with the monotonic clock, handed to the core, and its effects on
the device are carried out before the next event is looked at.

The executor's thread takes the turn when a step ends, so that the next step starts without waking
anybody. What a turn has to say to clients, observers and the event log is told by the engine's own
thread, in the order of the turns, while the device works.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import Final

from headrace.adapters.executors.port import Executor
from headrace.adapters.movers.port import Mover
from headrace.core.base.errors import InvariantError, OverloadError
from headrace.core.base.events import (
    Arrive,
    CallAt,
    Cancel,
    EndLease,
    EngineEffect,
    EngineEvent,
    StepDone,
    StepFailed,
    Timer,
)
from headrace.core.base.request import FinishReason, SeqSpec, Slo
from headrace.core.base.types import NS_PER_S, Ns, SeqId
from headrace.core.config.schema import WorkerConfig
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.engine.build import build_worker
from headrace.core.engine.stats import EngineStats
from headrace.core.router.decision import Decision
from headrace.core.telemetry import Telemetry
from headrace.live.device import Device
from headrace.live.event_log import LogHeader, Recorder
from headrace.live.listeners import RETRY_AFTER_S, Listeners, Observer, Sink, refusals
from headrace.live.messages import Call, Check, Close, Drain, Message, Submit, Turn
from headrace.live.port import PoolStatus, WorkerState

_log = logging.getLogger(__name__)

# An idle engine checks itself once, but not in the way of a request that follows at once.
IDLE_CHECK_AFTER_S = 0.25
# Turns that may wait to be told before the device has to.
MAX_UNTOLD = 3
_NOTHING = Arrive(())  # stands for the event where a check finds that a law is broken


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
        mover: Mover | None = None,
    ) -> None:
        cost = FittedCostModel.prior() if cost is None else cost
        self.cost: Final = cost
        self._core = build_worker(config, executor.spec, cost)
        self._device = Device(executor, mover, self._end_step, self._post)
        header = LogHeader(config=config, spec=executor.spec, cost=cost)
        self._recorder = Recorder(event_log, header)
        self._listeners = Listeners(self.cancel)
        self._failure: str | None = None
        self._next_seq_id = 0
        # Over the next id, over who observes, and over the order of messages and the flags below.
        self._gate = threading.Lock()
        self._is_closed = self._is_draining = False
        self._inbox: deque[Message] = deque()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # of the engine thread
        # Held by whoever takes a turn: over the core, and all that follows.
        self._turn = threading.Lock()
        self._now = Ns(0)
        self._timers: list[tuple[Ns, int]] = []
        self._is_refusing = False
        self._is_ending = False
        self._untold: deque[Turn | Callable[[], None]] = deque()
        # The rest belongs to the engine thread.
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
        with self._gate:
            first = self._next_seq_id
            self._next_seq_id += n
        return range(first, first + n)

    def submit(self, specs: Sequence[SeqSpec], sink: Sink) -> None:
        """As Engine.submit. An engine that drains or has failed rejects with status 503; one that
        is closed raises OverloadError.
        """
        with self._gate:
            if not self._is_closed:
                self._post(Submit(tuple(specs), sink))
                return
        raise OverloadError("the engine is closed", retry_after_s=RETRY_AFTER_S)

    def cancel(self, seq_id: SeqId, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """As Engine.cancel, at the next step border."""
        self._post(Cancel(seq_id, reason))

    def end_lease(self, seq_id: SeqId) -> None:
        """Let go of the blocks of a sequence that has ended with `is_leased`. Idempotent."""
        self._post(EndLease(seq_id))

    def stats(self) -> EngineStats:
        """As of the last event."""
        with self._turn:
            return self._core.stats()

    def workers(self) -> Sequence[WorkerState]:
        return ()

    def pools(self) -> Sequence[PoolStatus]:
        return ()

    def decision(self, request_id: str) -> Decision | None:
        return None

    def telemetry(self, default_slo: Slo) -> Telemetry:
        return Telemetry(default_slo, self.cost)

    def observe(self, callback: Observer) -> None:
        """As Engine.observe. Refusals and failures that are the engine's own, not the core's, are
        shown as effects too.
        """
        with self._gate:
            self._listeners.observe(callback)

    def call_soon(self, callback: Callable[[Ns], None]) -> None:
        """As Engine.call_soon. An engine that is closed drops it."""
        self._post(Call(callback))

    def check(self) -> None:
        """Check every law of the core between two events. Raises InvariantError, also where it was
        broken before.
        """
        done: Future[None] = Future()
        with self._gate:
            if not (is_closed := self._is_closed):
                self._post(Check(done))
        if is_closed:
            self._thread.join()
            with self._turn:
                self._check(done)
            self._tell_all()
        done.result()

    def drain(self, timeout_s: float) -> bool:
        """Refuse new sequences, wait until those that live have ended; False = some still live."""
        done: Future[None] = Future()
        with self._gate:
            self._is_draining = True
            if self._is_closed:
                return True
            self._post(Drain(done))
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
                self._post(Close())
        self._thread.join()
        if is_first:
            self._device.close()
            self._recorder.close()

    def _post(self, message: Message) -> None:
        self._inbox.append(message)
        self._wakes.put(None)

    def _end_step(self, event: StepDone | StepFailed) -> None:
        """The executor's word, on its own thread, which has the next step before it is free.

        But not where the next step has been planned ahead, which runs at once; nor where telling
        lags behind, so that steps do not run away from those who hear of them.
        """
        self._inbox.append(event)
        if self._device.num_steps == 1 and len(self._untold) < MAX_UNTOLD:
            self._take_turn()
        self._wakes.put(None)

    # ---- whoever has the turn

    def _take_turn(self) -> None:
        with self._turn:
            while self._timers and self._timers[0][0] <= time.monotonic_ns():
                self._handle(Timer(heappop(self._timers)[1]))
            self._tell_lost()
            while self._inbox:
                self._receive(self._inbox.popleft())
                self._tell_lost()

    def _receive(self, message: Message) -> None:
        match message:
            case Submit(seqs, sink):
                self._submit(seqs, sink)
            case Check(done):
                self._check(done)
            case Drain(done):
                self._is_refusing = True
                self._untold.append(partial(self._drains.append, done))
            case Call(callback):
                now = Ns(max(self._now, time.monotonic_ns()))
                self._untold.append(partial(self._call, callback, now))
            case Close():
                self._is_refusing = self._is_ending = True
                for seq_id in self._listeners.living():
                    self._handle(Cancel(seq_id))
            case _:
                self._handle(message)

    def _tick(self) -> Ns:
        # Strictly increasing, so that a simulation of the log meets the events in this order too.
        self._now = Ns(max(self._now + 1, time.monotonic_ns()))
        return self._now

    def _submit(self, seqs: tuple[SeqSpec, ...], sink: Sink) -> None:
        event = Arrive(seqs)
        self._listeners.add(seqs, sink)
        if self._failure:
            self._refuse(event, "engine_failed", "the engine has failed")
        elif self._is_refusing:
            self._refuse(event, "draining", "the server is shutting down")
        else:
            self._handle(event)

    def _refuse(self, event: Arrive, code: str, message: str) -> None:
        words = refusals(event, code, message)
        self._untold.append(Turn(self._tick(), event, words, is_recorded=False))

    def _check(self, done: "Future[None]") -> None:
        try:
            if self._failure:
                raise InvariantError(f"the engine has failed: {self._failure}")
            self._core.check()
        except Exception as error:
            if not self._failure:
                self._fail(self._tick(), _NOTHING, (), error)
            self._untold.append(partial(done.set_exception, error))
        else:
            self._untold.append(partial(done.set_result, None))

    def _handle(self, event: EngineEvent) -> None:
        self._device.note(event)
        if self._failure:
            return
        now = self._tick()
        effects: Sequence[EngineEffect] = ()
        try:
            effects = self._core.handle(now, event)
            self._device.carry_out(effects)
            for effect in effects:
                if isinstance(effect, CallAt):
                    heappush(self._timers, (effect.at_ns, effect.timer_id))
        except Exception as error:
            self._fail(now, event, effects, error)
        else:
            self._untold.append(Turn(now, event, effects))

    def _tell_lost(self) -> None:
        while (lost := self._device.next_lost()) is not None:
            self._handle(lost)

    def _fail(
        self, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect], error: Exception
    ) -> None:
        """Whatever it was, the core can no longer be trusted."""
        self._failure = f"{type(error).__name__}: {error}"
        self._untold.append(Turn(now, event, effects, event is not _NOTHING, error))

    # ---- engine thread

    def _run(self) -> None:
        while True:
            self._take_turn()
            self._tell_all()
            num_running = 0 if self._failure else self._device.num_steps
            if self._is_ending and not (num_running or self._device.num_copies):
                return
            try:
                self._wakes.get(timeout=self._timeout_s())
                while not self._wakes.empty():
                    self._wakes.get()
            except queue.Empty:
                self._check_idle()

    def _tell_all(self) -> None:
        """Turns in their order; then those who wait for the last sequence's end."""
        was_busy = False
        while self._untold:
            item = self._untold.popleft()
            if isinstance(item, Turn):
                is_end = isinstance(item.event, StepDone | StepFailed)
                was_busy = was_busy or is_end or self._is_busy
                self._tell(item)
            else:
                item()
        if was_busy and not self._is_busy:
            self._recorder.flush()
            self._is_check_due = True
        if self._drains and not self._listeners.num_living:
            for waiting in self._drains:
                waiting.set_result(None)
            self._drains.clear()

    def _tell(self, turn: Turn) -> None:
        if turn.is_recorded:
            self._recorder.record(turn.now, turn.event, turn.effects)
        if turn.error is None:
            self._listeners.tell(turn.now, turn.event, turn.effects)
            return
        _log.critical("engine has failed", exc_info=turn.error)
        self._recorder.flush()
        self._listeners.end_all(turn.now, turn.event, f"the engine has failed: {self._failure}")

    def _call(self, callback: Callable[[Ns], None], now: Ns) -> None:
        try:
            callback(now)
        except Exception:
            _log.exception("a call on the engine thread failed")

    def _timeout_s(self) -> float | None:
        """Seconds until there is something to do without a message; None = never."""
        timeout_s = IDLE_CHECK_AFTER_S if self._is_check_due and not self._is_busy else None
        with self._turn:
            if self._timers:
                due_s = max(0, self._timers[0][0] - time.monotonic_ns()) / NS_PER_S
                timeout_s = min(due_s, timeout_s or 3600.0)
        return timeout_s

    @property
    def _is_busy(self) -> bool:
        device = self._device
        return device.num_steps + device.num_copies + self._listeners.num_living > 0

    def _check_idle(self) -> None:
        """The conservation law: when nobody is served, nothing is held."""
        with self._turn:
            if not self._is_check_due or self._is_busy or self._failure or self._inbox:
                return
            self._is_check_due = False
            try:
                self._core.check()
                stats = self._core.stats()
                num_held = stats.num_pinned_blocks - stats.num_lent_blocks
                if stats.num_running or stats.num_waiting or num_held:
                    raise InvariantError("idle engine holds something", stats=stats)
            except Exception as error:
                self._fail(self._tick(), _NOTHING, (), error)
