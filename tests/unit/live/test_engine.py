"""LiveEngine: one thread, one core, and every sequence ends exactly once whatever happens."""

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.core.base.errors import InvariantError, OverloadError
from headrace.core.base.events import (
    Admitted,
    Arrive,
    Emit,
    EngineEffect,
    Finish,
    StepDone,
    StepFailed,
    Timer,
)
from headrace.core.base.plan import SeqResult, StepPlan, StepResult
from headrace.core.base.request import FinishReason
from headrace.core.base.types import NS_PER_MS, Ns, SeqId
from headrace.live import engine as engine_module
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
    assert executor.num_closed == 1


def wait_until_idle(engine: LiveEngine) -> None:
    # `check` runs on the engine thread, behind everything that was posted before it.
    engine.check()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pinned_blocks) == (0, 0, 0)


def test_a_sequence_lives(engine: LiveEngine, executor: ManualExecutor) -> None:
    ear = Ear()
    engine.submit([seq_spec(0, max_tokens=3)], ear)
    assert isinstance(ear.hear(), Admitted)
    assert engine.stats().num_running == 1
    plans = [executor.next() for _ in range(3)]
    ear.hear_ends(1)
    assert [plan.num_tokens for plan in plans] == [3, 1, 1]
    assert len(ear.tokens[SeqId(0)]) == 3
    assert ear.finish().reason is FinishReason.LENGTH
    wait_until_idle(engine)


def test_ids_are_given_once(engine: LiveEngine) -> None:
    ids: list[int] = []

    def take() -> None:
        for n in (1, 3, 2) * 50:
            ids.extend(engine.next_seq_ids(n))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ids) == list(range(4 * 300))


def test_cancelling_is_idempotent_and_frees(engine: LiveEngine, executor: ManualExecutor) -> None:
    ear = Ear()
    engine.submit([seq_spec(0, max_tokens=50), seq_spec(1, max_tokens=50)], ear)
    executor.next()
    for _ in range(3):
        engine.cancel(SeqId(0))
        engine.cancel(SeqId(77))
    engine.cancel(SeqId(1))
    executor.next()
    ear.hear_ends(2)
    engine.cancel(SeqId(0))
    assert {ear.finish(0).reason, ear.finish(1).reason} == {FinishReason.CANCELLED}
    wait_until_idle(engine)
    assert executor.num_started == 2


def test_a_deadline_ends_a_sequence(engine: LiveEngine, executor: ManualExecutor) -> None:
    ear = Ear()
    deadline = time.monotonic_ns() + 20 * NS_PER_MS
    engine.submit(
        [seq_spec(0, max_tokens=50), seq_spec(1, max_tokens=50, deadline_ns=deadline)], ear
    )
    # The step that runs holds both until it ends; the timer fires meanwhile.
    threading.Timer(0.05, executor.next).start()
    ear.hear_ends(1)
    assert time.monotonic_ns() >= deadline
    assert ear.finish(1).reason is FinishReason.DEADLINE
    assert SeqId(0) not in ear.ends


def test_a_passed_deadline_ends_a_sequence_that_waits(executor: ManualExecutor) -> None:
    with live_engine(executor, max_running_seqs=1) as engine:
        ear = Ear()
        engine.submit([seq_spec(0, max_tokens=50), seq_spec(1, deadline_ns=1)], ear)
        ear.hear_ends(1)
        assert ear.finish(1).reason is FinishReason.DEADLINE
        executor.next()


def test_an_executor_that_cannot_start_fails_the_step_only(
    engine: LiveEngine, executor: ManualExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    num_faults = 2

    def fail_at_first(plan: StepPlan) -> None:
        nonlocal num_faults
        if num_faults:
            num_faults -= 1
            raise RuntimeError("no such device")

    executor.on_start = fail_at_first
    ear = Ear()
    with caplog.at_level(logging.ERROR, "headrace.live.engine"):
        engine.submit([seq_spec(0, max_tokens=1)], ear)
        executor.next()
        ear.hear_ends(1)
    assert ear.finish().reason is FinishReason.LENGTH
    assert ear.finish().num_preemptions == 2
    assert "no such device" in caplog.text
    assert engine.failure is None


def test_steps_that_keep_failing_end_their_sequences(
    engine: LiveEngine, executor: ManualExecutor
) -> None:
    executor.outcome = lambda plan: StepFailed(plan.step_id, "device on fire")  # type: ignore[method-assign]
    ear = Ear()
    engine.submit([seq_spec(0)], ear)
    for _ in range(3):
        executor.next()
    ear.hear_ends(1)
    assert ear.finish().reason is FinishReason.ERROR
    assert ear.finish().error == "device on fire"
    wait_until_idle(engine)


@pytest.fixture
def expected_failure() -> Iterator[None]:
    """Failures are logged with their traceback; here they are the point."""
    for name in ("engine", "listeners", "event_log"):
        logging.getLogger(f"headrace.live.{name}").disabled = True
    yield
    for name in ("engine", "listeners", "event_log"):
        logging.getLogger(f"headrace.live.{name}").disabled = False


@pytest.mark.usefixtures("expected_failure")
def test_a_broken_core_fails_everyone_and_hangs_nobody(tmp_path: Path) -> None:
    executor = ManualExecutor(worker_spec())
    executor.outcome = lambda plan: StepDone(  # type: ignore[method-assign]
        StepResult(plan.step_id, (SeqResult(SeqId(99)),), Ns(1))
    )
    log = tmp_path / "log"
    seen: list[tuple[type, list[EngineEffect]]] = []
    with live_engine(executor, event_log=log, max_running_seqs=1) as engine:
        engine.observe(lambda now, event, effects: seen.append((type(event), list(effects))))
        ear, late = Ear(), Ear()
        engine.submit([seq_spec(0), seq_spec(1)], ear)
        executor.next()
        ear.hear_ends(2)
        for seq_id in (0, 1):
            assert ear.finish(seq_id).reason is FinishReason.ERROR
            assert "out of order" in ear.finish(seq_id).error
        assert "InvariantError" in (engine.failure or "")
        assert not engine.is_accepting
        engine.submit([seq_spec(2)], late)
        late.hear_ends(1)
        assert late.reject(2).status_hint == 503
        assert late.reject(2).retry_after_s
        engine.cancel(SeqId(0))
        with pytest.raises(InvariantError, match="has failed"):
            engine.check()
        assert engine.drain(WAIT_S)
        # What broke it is on disk while the process still lives.
        with EventLogReader(log) as frames:
            events = [frame.event for frame in frames]
    assert [type(event) for event in events] == [Arrive, StepDone]
    assert [kind for kind, _ in seen] == [Arrive, StepDone, Arrive]
    assert [type(effect) for effect in seen[1][1]] == [Finish, Finish]


@pytest.mark.usefixtures("expected_failure")
def test_a_law_found_broken_by_check_fails_the_engine(engine: LiveEngine) -> None:
    def broken() -> None:
        raise InvariantError("block leak")

    engine._core.check = broken  # type: ignore[method-assign]
    with pytest.raises(InvariantError, match="block leak"):
        engine.check()
    assert "block leak" in (engine.failure or "")


@pytest.mark.usefixtures("expected_failure")
def test_the_law_is_checked_when_the_engine_becomes_idle(
    engine: LiveEngine, executor: ManualExecutor
) -> None:
    num_checks = 0

    def count() -> None:
        nonlocal num_checks
        num_checks += 1
        raise InvariantError("block leak")

    engine._core.check = count  # type: ignore[method-assign]
    ear = Ear()
    engine.submit([seq_spec(0, max_tokens=2)], ear)
    executor.next()
    ear.hear()
    assert num_checks == 0
    executor.next()
    ear.hear_ends(1)
    until = time.monotonic() + WAIT_S
    while engine.failure is None and time.monotonic() < until:
        time.sleep(0.01)
    assert num_checks == 1
    assert "block leak" in (engine.failure or "")


@pytest.mark.usefixtures("expected_failure")
def test_a_sink_that_raises_loses_its_sequence_only(
    engine: LiveEngine, executor: ManualExecutor
) -> None:
    def broken(effect: EngineEffect) -> None:
        if isinstance(effect, Emit):
            raise ValueError("reader is gone")

    ear = Ear()
    engine.submit([seq_spec(0, max_tokens=50)], broken)
    engine.submit([seq_spec(1, max_tokens=3)], ear)
    for _ in range(4):
        executor.next()
    ear.hear_ends(1)
    assert ear.finish(1).reason is FinishReason.LENGTH
    engine.check()  # behind the cancel that the fault has posted
    executor.release()
    assert engine.drain(WAIT_S)
    assert executor.num_started < 10
    assert engine.failure is None


@pytest.mark.usefixtures("expected_failure")
def test_an_observer_that_raises_hurts_nobody(engine: LiveEngine, executor: ManualExecutor) -> None:
    def broken(now: Ns, event: object, effects: object) -> None:
        raise ValueError("broken")

    times: list[Ns] = []
    engine.observe(broken)
    engine.observe(lambda now, event, effects: times.append(now))
    ear = Ear()
    engine.submit([seq_spec(0, max_tokens=2)], ear)
    executor.next()
    executor.next()
    ear.hear_ends(1)
    engine.check()
    assert len(times) == 3
    assert times == sorted(set(times))


def test_draining_lets_the_living_end_and_refuses_the_rest(
    engine: LiveEngine, executor: ManualExecutor
) -> None:
    ear, late = Ear(), Ear()
    engine.submit([seq_spec(0, max_tokens=2)], ear)
    assert not engine.drain(0.01)
    assert not engine.is_accepting
    engine.submit([seq_spec(1), seq_spec(2)], late)
    late.hear_ends(2)
    assert late.reject(1).code == "draining"
    assert late.reject(2).status_hint == 503
    executor.next()
    executor.next()
    assert engine.drain(WAIT_S)
    ear.hear_ends(1)
    assert ear.finish().reason is FinishReason.LENGTH


def test_a_drain_ends_when_the_engine_is_closed(executor: ManualExecutor) -> None:
    with live_engine(executor) as engine:
        engine.submit([seq_spec(0, max_tokens=50)], Ear())
        results: list[bool] = []
        draining = threading.Thread(target=lambda: results.append(engine.drain(WAIT_S)))
        draining.start()
        while engine.is_accepting:
            time.sleep(0.001)
        executor.release()
        engine.close()
        draining.join(WAIT_S / 2)
        assert results == [True]


@pytest.mark.usefixtures("expected_failure")
def test_a_fault_ends_the_recording_only(executor: ManualExecutor, tmp_path: Path) -> None:
    with live_engine(executor, event_log=tmp_path / "log") as engine:
        ear = Ear()
        engine.submit([seq_spec(0, max_tokens=3)], ear)
        executor.next()
        ear.hear()
        writer = engine._recorder._writer
        assert writer is not None
        writer._file.close()
        executor.release()
        ear.hear_ends(1)
        assert ear.finish().reason is FinishReason.LENGTH
        engine.check()
        assert engine.failure is None


def test_an_engine_that_stays_idle_checks_itself_once(
    executor: ManualExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "IDLE_CHECK_AFTER_S", 0.01)
    with live_engine(executor) as engine:
        num_checks = 0

        def count() -> None:
            nonlocal num_checks
            num_checks += 1

        engine._core.check = count  # type: ignore[method-assign]
        has_fired = threading.Event()
        engine.observe(lambda now, event, _: has_fired.set() if isinstance(event, Timer) else None)
        ear = Ear()
        # Its deadline comes when it has long ended, and makes nothing busy.
        late_ns = time.monotonic_ns() + 60 * NS_PER_MS
        engine.submit([seq_spec(0, max_tokens=1, deadline_ns=late_ns)], ear)
        executor.next()
        ear.hear_ends(1)
        assert has_fired.wait(WAIT_S)
        assert num_checks == 1
        time.sleep(0.05)
        assert num_checks == 1


def test_closing_cancels_waits_for_the_step_and_is_final(executor: ManualExecutor) -> None:
    ear = Ear()
    with live_engine(executor, max_running_seqs=1) as engine:
        engine.submit([seq_spec(0, max_tokens=50), seq_spec(1)], ear)
        ear.hear()
        closing = threading.Thread(target=engine.close)
        closing.start()
        ear.hear_ends(1)
        assert ear.finish(1).reason is FinishReason.CANCELLED
        assert closing.is_alive()
        executor.next()
        closing.join(WAIT_S)
        assert not closing.is_alive()
        ear.hear_ends(2)
        assert ear.finish(0).reason is FinishReason.CANCELLED
        with pytest.raises(OverloadError, match="closed"):
            engine.submit([seq_spec(2)], ear)
        engine.cancel(SeqId(0))
        engine.check()
        assert engine.drain(0)
        engine.close()
    assert executor.num_closed == 1


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_many_threads_at_once(overlap: str) -> None:
    """Submit, cancel, read and check from everywhere: every sequence ends once, nothing is left."""
    executor = ManualExecutor(worker_spec(num_blocks=20), is_free=True)
    with live_engine(executor, overlap=overlap) as engine:
        ears = [Ear() for _ in range(8)]

        def client(ear: Ear) -> None:
            for i in range(20):
                ids = engine.next_seq_ids(2)
                engine.submit([seq_spec(n, tuple(range(i + 1)), max_tokens=8) for n in ids], ear)
                if i % 3 == 0:
                    engine.cancel(SeqId(ids[0]))
                engine.stats()
                if i % 5 == 0:
                    engine.check()

        threads = [threading.Thread(target=client, args=(ear,)) for ear in ears]
        for thread in threads:
            thread.start()
        for thread, ear in zip(threads, ears, strict=True):
            thread.join(WAIT_S)
            ear.hear_ends(40)
        assert len({seq_id for ear in ears for seq_id in ear.ends}) == 320
        assert engine.drain(WAIT_S)
        wait_until_idle(engine)
