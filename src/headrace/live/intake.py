"""Intake: what callers of any engine meet, on whatever thread they are.

One thread owns an engine's core, and everything that happens reaches it as a message through one
inbox, in one order. Decides that order, who gets which sequence id, and who comes too late; refuses
to know what an engine does with a message.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from heapq import heappop, heappush
from typing import Generic, TypeVar

from headrace.core.base.errors import OverloadError
from headrace.core.base.events import Arrive, CallAt, Cancel, EngineEffect, Timer
from headrace.core.base.request import FinishReason, SeqSpec
from headrace.core.base.types import Ns, SeqId
from headrace.live.listeners import RETRY_AFTER_S, Listeners, Observer, Sink, refusals
from headrace.live.messages import Asked, Call, CallThere, Check, Close, Drain, Submit

_log = logging.getLogger(__name__)

Own = TypeVar("Own")  # an engine's own kinds of messages


class Timers:
    """Those that a core has asked for, in the order of their times."""

    def __init__(self) -> None:
        self._heap: list[tuple[Ns, int]] = []

    @property
    def next_ns(self) -> Ns | None:
        return self._heap[0][0] if self._heap else None

    def add(self, timer: CallAt) -> None:
        heappush(self._heap, (timer.at_ns, timer.timer_id))

    def pop_due(self, now_ns: int) -> Timer | None:
        if self._heap and self._heap[0][0] <= now_ns:
            return Timer(heappop(self._heap)[1])
        return None


class Intake(Generic[Own]):
    """An engine is one rather than has one: all that it would do is to pass these calls on.

    `wake` is called after each message, from any thread. The engine calls `_start` when it is
    complete, and sets `_failure`, `_is_refusing` and `_is_ending` on its own thread.
    """

    _thread: threading.Thread

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._failure: str | None = None
        self._next_seq_id = 0
        # Over the next id, over who observes, and over the order of messages and the flags below.
        self._gate = threading.Lock()
        self._is_closed = self._is_draining = False
        self._inbox: deque[Asked | Own] = deque()
        self._listeners = Listeners(self.cancel)
        # Held by whoever works: over the core, and all that follows.
        self._turn = threading.Lock()
        self._now = Ns(0)
        self._timers = Timers()
        self._is_refusing = False
        self._is_ending = False
        self._drains: list[Future[None]] = []

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
            first = self._next_seq_id
            self._next_seq_id += n
        return range(first, first + n)

    def submit(self, specs: Sequence[SeqSpec], sink: Sink) -> None:
        """As Engine.submit. An engine that drains or has failed rejects with status 503; one that
        is closed raises OverloadError.
        """
        if not self._post_if_open(Submit(tuple(specs), sink)):
            raise OverloadError("the engine is closed", retry_after_s=RETRY_AFTER_S)

    def cancel(self, seq_id: SeqId, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """As Engine.cancel."""
        self._post(Cancel(seq_id, reason))

    def observe(self, callback: Observer) -> None:
        """As Engine.observe. Refusals and failures that are the engine's own, not the core's, are
        shown as effects too.
        """
        with self._gate:
            self._listeners.observe(callback)

    def after_words(self, callback: Callable[[], None]) -> None:
        """As Engine.after_words."""
        with self._gate:
            self._listeners.after_words(callback)

    def speak_in(self, call: CallThere) -> None:
        """As Engine.speak_in. Here nobody's help is needed."""

    def call_soon(self, callback: Callable[[Ns], None]) -> None:
        """As Engine.call_soon. An engine that is closed drops it."""
        self._post(Call(callback))

    def drain(self, timeout_s: float) -> bool:
        """Refuse new sequences, wait until those that live have ended; False = some still live."""
        done: Future[None] = Future()
        with self._gate:
            self._is_draining = True
        if not self._post_if_open(Drain(done)):
            return True
        try:
            done.result(timeout_s)
        except TimeoutError:
            return False
        return True

    def _start(self, run: Callable[[], None], name: str) -> None:
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def _end(self) -> bool:
        """Let the engine's thread end, and wait for that; whether this call was the first."""
        with self._gate:
            is_first = not self._is_closed
            self._is_closed = True
            if is_first:
                self._post(Close())
        self._thread.join()
        return is_first

    def _post(self, message: Asked | Own) -> None:
        self._inbox.append(message)
        self._wake()

    def _post_if_open(self, message: Submit | Check | Drain) -> bool:
        """False where nobody would ever answer."""
        with self._gate:
            if not self._is_closed:
                self._post(message)
            return not self._is_closed

    # ---- the engine's thread

    def _tick(self) -> Ns:
        # Strictly increasing, so that a simulation of the log meets the events in this order too.
        self._now = Ns(max(self._now + 1, time.monotonic_ns()))
        return self._now

    def _refusals(self, event: Arrive) -> list[EngineEffect]:
        """The engine's own words to those who come too late; none where they come in time."""
        if self._failure:
            return refusals(event, "engine_failed", "the engine has failed")
        if self._is_refusing:
            return refusals(event, "draining", "the server is shutting down")
        return []

    def _call(self, callback: Callable[[Ns], None], now: Ns) -> None:
        try:
            callback(now)
        except Exception:
            _log.exception("a call on the engine thread failed")
