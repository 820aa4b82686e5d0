"""LiveEngine: drives one EngineCore under the real clock.

Everything that happens, from whatever thread, goes through one inbox. Whoever holds the turn
empties it: each event is stamped with the monotonic clock, handed to the core, and its effects on
the device are carried out before the next event is looked at.

The executor's thread takes the turn when a step ends, so that the next step starts without waking
anybody. What a turn has to say to clients, observers and the event log is told by the engine's own
thread, in the order of the turns, while the device works.

Where clients are all in one event loop, that may take the engine thread's place at the end of a
step (`speak_in`): one thread wakes for a token instead of two. The engine's thread then looks after
what is not as urgent, now and then, or when there was more to say than tokens.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final

from headrace.adapters.executors.port import Executor
from headrace.adapters.movers.port import Mover
from headrace.core.base.errors import InvariantError, RequestError
from headrace.core.base.events import (
    Arrive,
    CallAt,
    Cancel,
    Computed,
    CopyDone,
    EndLease,
    EngineEffect,
    EngineEvent,
    Expect,
    StepDone,
    StepFailed,
)
from headrace.core.base.request import SeqSpec, Slo
from headrace.core.base.types import NS_PER_S, Ns, SeqId
from headrace.core.base.worker import Role
from headrace.core.config.schema import WorkerConfig
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.engine.build import build_worker
from headrace.core.engine.stats import EngineStats
from headrace.core.router.decision import Decision
from headrace.core.telemetry import Telemetry
from headrace.live.device import Device
from headrace.live.event_log import LogHeader, Recorder
from headrace.live.intake import Intake
from headrace.live.listeners import Sink
from headrace.live.messages import Asked, Call, CallThere, Check, Close, Drain, Submit, Turn
from headrace.live.port import PoolStatus, WorkerState

_log = logging.getLogger(__name__)

# An idle engine checks itself once, but not in the way of a request that follows at once.
IDLE_CHECK_AFTER_S = 0.25
# Turns that may wait to be told before the device has to.
MAX_UNTOLD = 3
# Observers and the event log hear so late of tokens that others have told, at most.
SHOW_AFTER_S = 0.05
MAX_UNSHOWN = 256  # turns that may wait for that
_NOTHING = Arrive(())  # stands for the event where a check finds that a law is broken


_Own = StepDone | StepFailed | CopyDone | EndLease | Expect | Computed


class LiveEngine(Intake[_Own]):
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
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # of the engine thread
        super().__init__(partial(self._wakes.put, None))
        self.cost: Final = cost
        self._core = build_worker(config, executor.spec, cost)
        self._device = Device(executor, mover, self._end_step, self._post)
        header = LogHeader(config=config, spec=executor.spec, cost=cost)
        self._recorder = Recorder(event_log, header)
        self._untold: deque[Turn | Callable[[], None]] = deque()
        self._unshown: deque[Turn | Callable[[], None]] = deque()  # their words have been said
        self._speaking = threading.Lock()  # held by whoever says words
        self._was_busy = False  # since it was found idle
        self._call_speaker: CallThere | None = None
        # The rest belongs to the engine thread.
        self._is_check_due = False
        self._start(self._run, "headrace-engine")

    # ---- any thread

    def end_lease(self, seq_id: SeqId) -> None:
        """Let go of the blocks of a sequence that has ended with `is_leased`, or is expected.
        Idempotent.
        """
        self._post(EndLease(seq_id))

    def expect(self, event: Expect | Computed) -> None:
        """A sequence will come, or so much of its prompt is computed where it comes from."""
        self._post(event)

    def stats(self) -> EngineStats:
        """As of the last event."""
        with self._turn:
            return self._core.stats()

    def speak_in(self, call: CallThere) -> None:
        """As Engine.speak_in."""
        self._call_speaker = call
        self._wakes.put(None)  # the engine's thread may sleep until a step wakes it

    def workers(self) -> Sequence[WorkerState]:
        return ()

    def absence(self) -> str:
        return ""

    def set_role(self, worker: str, role: Role) -> Future[None]:
        done: Future[None] = Future()
        error = RequestError("this server has no workers", status_hint=404, code="not_found")
        done.set_exception(error)
        return done

    def pools(self) -> Sequence[PoolStatus]:
        return ()

    def decision(self, request_id: str) -> Decision | None:
        return None

    def telemetry(self, default_slo: Slo) -> Telemetry:
        return Telemetry(default_slo, self.cost)

    def check(self) -> None:
        """Check every law of the core between two events. Raises InvariantError, also where it was
        broken before.
        """
        done: Future[None] = Future()
        if not self._post_if_open(Check(done)):
            self._thread.join()
            with self._turn:
                self._check(done)
            self._say_all()
            self._show_all()
        done.result()

    def close(self) -> None:
        """Cancel what lives, wait for the running step, join the thread, close executor and log.
        Copies end with their mover. Idempotent.
        """
        if self._end():
            self._device.close()
            self._take_turn()  # of copies, which have no end of their own
            self._say_all()
            self._show_all()
            self._recorder.close()

    def _end_step(self, event: StepDone | StepFailed) -> None:
        """The executor's word, on its own thread, which has the next step before it is free.

        But not where a step that was planned ahead runs by now; nor where telling
        lags behind, so that steps do not run away from those who hear of them.
        """
        self._device.end_step()
        self._inbox.append(event)
        if self._device.is_idle and len(self._untold) < MAX_UNTOLD:
            self._take_turn()
        if self._call_speaker is not None and len(self._unshown) < MAX_UNSHOWN:
            try:
                self._call_speaker(self._speak)
                return
            except RuntimeError:
                self._call_speaker = None
        self._wakes.put(None)

    # ---- a speaker's thread

    def _speak(self) -> None:
        """In the place of the engine's thread, after a step."""
        self._take_turn()
        # What comes last must not wait to be shown until something else happens.
        if not self._say_all() or self._is_ending or not self._is_busy:
            self._wakes.put(None)

    # ---- whoever has the turn

    def _take_turn(self) -> None:
        with self._turn:
            while (timer := self._timers.pop_due(time.monotonic_ns())) is not None:
                self._handle(timer)
            self._tell_lost()
            while self._inbox:
                self._receive(self._inbox.popleft())
                self._tell_lost()

    def _receive(self, message: Asked | _Own) -> None:
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

    def _submit(self, seqs: tuple[SeqSpec, ...], sink: Sink) -> None:
        event = Arrive(seqs)
        self._listeners.add(seqs, sink)
        words = self._refusals(event)
        if words:
            self._untold.append(Turn(self._tick(), event, words, is_recorded=False))
        else:
            self._handle(event)

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
                    self._timers.add(effect)
                    self._wakes.put(None)  # the engine's thread may sleep for longer
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
        living = self._listeners.living()
        self._untold.append(Turn(now, event, effects, event is not _NOTHING, error, living))

    def _say_all(self) -> bool:
        """What turns have to say to clients, in their order. Whether it was nothing but tokens."""
        is_plain = True
        with self._speaking:
            while self._untold:
                item = self._untold.popleft()
                if isinstance(item, Turn):
                    is_plain &= self._say(item)
                else:
                    is_plain = False
                self._unshown.append(item)
        return is_plain

    def _say(self, turn: Turn) -> bool:
        is_end = isinstance(turn.event, StepDone | StepFailed)
        self._was_busy = self._was_busy or is_end or self._is_busy
        return turn.error is None and self._listeners.say(turn.effects)

    # ---- engine thread

    def _run(self) -> None:
        while True:
            self._take_turn()
            with self._turn:  # so that the turn of the last step is among those that follow
                is_over = self._is_over
            self._say_all()
            self._show_all()
            if is_over:
                return
            try:
                self._wakes.get(timeout=self._timeout_s())
                while not self._wakes.empty():
                    self._wakes.get()
            except queue.Empty:
                self._check_idle()

    def _show_all(self) -> None:
        """Turns in their order; then those who wait for the last sequence's end."""
        while self._unshown:
            item = self._unshown.popleft()
            if isinstance(item, Turn):
                self._show(item)
            else:
                item()
        if self._was_busy and not self._is_busy:
            self._was_busy = False
            self._recorder.flush()
            self._is_check_due = True
        if self._drains and not self._listeners.num_living:
            for waiting in self._drains:
                waiting.set_result(None)
            self._drains.clear()

    def _show(self, turn: Turn) -> None:
        if turn.is_recorded:
            self._recorder.record(turn.now, turn.event, turn.effects)
        if turn.error is None:
            self._listeners.show(turn.now, turn.event, turn.effects)
            return
        _log.critical("engine has failed", exc_info=turn.error)
        self._recorder.flush()
        text = f"the engine has failed: {self._failure}"
        with self._speaking:
            self._listeners.end(turn.lost, turn.now, turn.event, text)

    def _timeout_s(self) -> float | None:
        """Seconds until there is something to do without a message; None = never."""
        timeout_s = IDLE_CHECK_AFTER_S if self._is_check_due and not self._is_busy else None
        if self._call_speaker is not None and self._is_busy:
            timeout_s = SHOW_AFTER_S
        with self._turn:
            due_ns = self._timers.next_ns
            if due_ns is not None:
                due_s = max(0, due_ns - time.monotonic_ns()) / NS_PER_S
                timeout_s = min(due_s, timeout_s or 3600.0)
        return timeout_s

    @property
    def _is_over(self) -> bool:
        num_running = 0 if self._failure else self._device.num_steps
        return self._is_ending and not num_running

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
