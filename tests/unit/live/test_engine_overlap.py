"""Two steps under way: the engine starts the second while the first runs, and keeps their order."""

import logging
from collections.abc import Callable

import pytest

from headrace.core.base.plan import StepPlan
from headrace.core.base.request import FinishReason
from headrace.core.base.types import SeqId
from headrace.live import engine as engine_module
from support.live import Ear, ManualExecutor, live_engine, seq_spec, worker_spec


@pytest.fixture
def executor() -> ManualExecutor:
    return ManualExecutor(worker_spec())


def test_a_step_planned_ahead_is_on_the_device_before_the_one_before_it_ends(
    executor: ManualExecutor,
) -> None:
    with live_engine(executor, overlap="on") as engine:
        ear = Ear()
        engine.submit([seq_spec(0, max_tokens=4)], ear)
        ear.hear()
        plans = []
        for num_started in (2, 3, 4, 4):
            engine.check()
            assert executor.num_started == num_started
            plans.append(executor.next())
        ear.hear_ends(1)
        assert [plan.is_ahead for plan in plans] == [False, True, True, True]
        assert len(ear.tokens[SeqId(0)]) == 4
        engine.check()
        assert engine.stats().num_pinned_blocks == 0


def test_a_device_does_not_wait_for_a_speaker_that_does_something_else(
    executor: ManualExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until there is a lot to say: two steps end unnoticed, and the next ones begin."""
    monkeypatch.setattr(engine_module, "SHOW_AFTER_S", 3600.0)
    num_calls = 0

    def busy(speak: Callable[[], None]) -> None:
        nonlocal num_calls
        num_calls += 1

    with live_engine(executor, overlap="on") as engine:
        ear = Ear()
        engine.speak_in(busy)
        engine.submit([seq_spec(0, max_tokens=50)], ear)
        engine.check()
        for number in range(1, 7):
            executor.next()
            assert num_calls == number
        assert executor.num_started == 6
        assert not ear.tokens
        monkeypatch.undo()
        executor.release()
        engine.cancel(SeqId(0))
        ear.hear_ends(1)
        assert len(ear.tokens[SeqId(0)]) >= 6
        engine.check()


def test_a_device_that_cannot_start_a_step_planned_ahead_fails_it(
    executor: ManualExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_ahead(plan: StepPlan) -> None:
        if plan.is_ahead:
            raise RuntimeError("only one at a time")

    executor.on_start = fail_ahead
    with caplog.at_level(logging.ERROR), live_engine(executor, overlap="on") as engine:
        ear = Ear()
        engine.submit([seq_spec(0, max_tokens=3)], ear)
        executor.next()
        executor.release()
        ear.hear_ends(1)
        assert ear.finish().reason is FinishReason.LENGTH
        assert engine.failure is None
    assert "only one at a time" in caplog.text
