"""What else runs on the engine's thread, and the clock that its events are stamped with."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from headrace.core.base.events import Arrive, Cancel, EngineEffect, EngineEvent, StepDone
from headrace.core.base.types import Ns, SeqId
from headrace.live import engine as engine_module
from headrace.live import intake as intake_module
from headrace.live.engine import LiveEngine
from headrace.live.event_log import EventLogReader
from support.live import WAIT_S, Ear, ManualExecutor, live_engine, seq_spec, worker_spec


@pytest.fixture
def executor() -> ManualExecutor:
    return ManualExecutor(worker_spec())


@pytest.fixture
def engine(executor: ManualExecutor) -> Iterator[LiveEngine]:
    with live_engine(executor) as engine:
        yield engine


def test_a_call_comes_after_what_was_submitted_before(
    engine: LiveEngine, executor: ManualExecutor
) -> None:
    order: list[str] = []
    times: list[Ns] = []

    def observer(now: Ns, event: object, effects: object) -> None:
        order.append(type(event).__name__)
        times.append(now)

    def call(now: Ns) -> None:
        order.append(threading.current_thread().name)
        times.append(now)

    engine.observe(observer)
    engine.submit([seq_spec(0)], Ear())
    engine.call_soon(call)
    engine.cancel(SeqId(0))
    engine.check()
    assert order == ["Arrive", "headrace-engine", "Cancel"]
    assert times == sorted(times)
    executor.next()


def test_a_call_that_raises_hurts_nobody(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("headrace.live.engine"), "disabled", True)

    def broken(now: Ns) -> None:
        raise ValueError("broken")

    engine.call_soon(broken)
    engine.check()
    assert engine.failure is None


class StandingClock:
    """Stands in for the `time` module of the engine: a coarse clock between two of its ticks."""

    def monotonic_ns(self) -> int:
        return 1000


def test_no_two_events_have_one_time(
    engine: LiveEngine, executor: ManualExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulation of the log would not know which of the two came first."""
    monkeypatch.setattr(intake_module, "time", StandingClock())
    times: list[Ns] = []
    engine.observe(lambda now, event, effects: times.append(now))
    ear = Ear()
    engine.submit([seq_spec(0, max_tokens=3)], ear)
    for _ in range(3):
        executor.next()
    ear.hear_ends(1)
    engine.check()
    assert times == [1000, 1001, 1002, 1003]


def test_a_speaker_is_called_after_a_step_and_says_its_words(
    engine: LiveEngine, executor: ManualExecutor
) -> None:
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    seen: list[str] = []
    ear = Ear()
    engine.observe(lambda now, event, effects: seen.append(type(event).__name__))
    engine.submit([seq_spec(0, max_tokens=3)], ear)
    engine.speak_in(calls.put)
    for _ in range(3):
        executor.next()
        calls.get(timeout=WAIT_S)()
    ear.hear_ends(1)
    assert len(ear.tokens[SeqId(0)]) == 3
    engine.check()
    assert seen == ["Arrive", "StepDone", "StepDone", "StepDone"]


def test_a_speaker_that_never_comes_is_done_without(
    engine: LiveEngine, executor: ManualExecutor
) -> None:
    ear = Ear()
    engine.submit([seq_spec(0, max_tokens=3)], ear)
    engine.speak_in(lambda speak: None)
    for _ in range(3):
        executor.next()
    ear.hear_ends(1)
    engine.check()


def test_a_speaker_that_comes_while_steps_run_need_not_say_anything(
    engine: LiveEngine, executor: ManualExecutor
) -> None:
    ear = Ear()
    engine.submit([seq_spec(0, max_tokens=3)], ear)
    executor.next()
    while not ear.tokens:
        ear.hear()
    time.sleep(0.05)  # the engine's thread sleeps by now
    engine.speak_in(lambda speak: None)
    for _ in range(2):
        executor.next()
    ear.hear_ends(1)
    engine.check()


def test_a_last_step_without_words_is_shown_at_once(
    executor: ManualExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "SHOW_AFTER_S", 3600.0)
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    seen: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    ear = Ear()

    def end_step() -> list[str]:
        executor.next()
        calls.get(timeout=WAIT_S)()
        return seen.get(timeout=WAIT_S)

    with live_engine(executor, overlap="on") as engine:
        engine.speak_in(calls.put)
        engine.submit([seq_spec(0, max_tokens=50)], ear)
        engine.observe(
            lambda now, event, effects: seen.put([type(one).__name__ for one in (event, *effects)])
        )
        executor.next()
        calls.get(timeout=WAIT_S)()
        engine.cancel(SeqId(0))
        while (told := seen.get(timeout=WAIT_S))[0] != "Cancel":
            pass
        while "Finish" not in told:
            told = end_step()
        time.sleep(0.05)  # the engine's thread sleeps by now
        assert end_step() == ["StepDone"]


def test_the_last_step_is_recorded_when_the_engine_is_closed(
    executor: ManualExecutor, tmp_path: Path
) -> None:
    is_ending, ear = threading.Event(), Ear()
    with live_engine(executor, event_log=tmp_path / "log", max_running_seqs=1) as engine:
        handle = engine._core.handle

        def slow(now: Ns, event: EngineEvent) -> Sequence[EngineEffect]:
            if isinstance(event, StepDone):
                is_ending.set()
                time.sleep(0.1)
            return handle(now, event)

        def observe(now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]) -> None:
            if isinstance(event, Cancel):
                assert is_ending.wait(WAIT_S)

        engine._core.handle = slow  # type: ignore[assignment]
        engine.observe(observe)
        engine.submit([seq_spec(0), seq_spec(1)], ear)
        closing = threading.Thread(target=engine.close)
        closing.start()
        ear.hear_ends(1)
        executor.next()
        closing.join(WAIT_S)
    with EventLogReader(tmp_path / "log") as frames:
        assert [type(frame.event) for frame in frames] == [Arrive, Cancel, Cancel, StepDone]


def test_a_speaker_that_is_gone_is_not_called_again(
    engine: LiveEngine, executor: ManualExecutor
) -> None:
    num_calls = 0

    def gone(speak: Callable[[], None]) -> None:
        nonlocal num_calls
        num_calls += 1
        raise RuntimeError("closed")

    ear = Ear()
    engine.submit([seq_spec(0, max_tokens=3)], ear)
    engine.speak_in(gone)
    for _ in range(3):
        executor.next()
    ear.hear_ends(1)
    engine.check()
    assert num_calls == 1


def test_words_that_fail_to_be_passed_on_hurt_nobody(
    engine: LiveEngine, executor: ManualExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise ValueError("broken")

    ear = Ear()
    engine.after_words(broken)
    with caplog.at_level(logging.ERROR):
        engine.submit([seq_spec(0, max_tokens=1)], ear)
        executor.next()
        ear.hear_ends(1)
        engine.check()
    assert "broken" in caplog.text
    assert engine.failure is None
