"""What else runs on the engine's thread, and the clock that its events are stamped with."""

import logging
import threading
from collections.abc import Iterator

import pytest

from headrace.core.base.types import Ns, SeqId
from headrace.live import intake as intake_module
from headrace.live.engine import LiveEngine
from support.live import Ear, ManualExecutor, live_engine, seq_spec, worker_spec


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
