"""An engine that fails while others come: everybody hears of it, once."""

import logging
import threading

import pytest

from headrace.core.base.events import StepDone
from headrace.core.base.plan import SeqResult, StepResult
from headrace.core.base.request import FinishReason
from headrace.core.base.types import Ns, SeqId
from support.live import WAIT_S, Ear, ManualExecutor, live_engine, seq_spec, worker_spec


@pytest.mark.parametrize("has_speaker", [False, True])
def test_who_comes_while_those_who_lived_hear_of_a_failure_is_refused_once(
    has_speaker: bool,
) -> None:
    """The turn may be another thread's by then: the executor's, or a speaker's."""
    executor = ManualExecutor(worker_spec())
    executor.outcome = lambda plan: StepDone(  # type: ignore[method-assign]
        StepResult(plan.step_id, (SeqResult(SeqId(99)),), Ns(1))
    )
    ear, late, last = Ear(), Ear(), Ear()
    log = logging.getLogger("headrace.live.engine")

    class Comes(logging.Filter):
        """Somebody, when the failure is logged."""

        def filter(self, record: logging.LogRecord) -> bool:
            live.submit([seq_spec(1), seq_spec(2)], late)
            other = threading.Thread(target=live._speak if has_speaker else live._take_turn)
            other.start()
            other.join(WAIT_S)
            return False

    comes = Comes()
    with live_engine(executor) as live:
        log.addFilter(comes)
        try:
            live.submit([seq_spec(0)], ear)
            executor.next()
            ear.hear_ends(1)
        finally:
            log.removeFilter(comes)
        assert ear.finish(0).reason is FinishReason.ERROR
        late.hear_ends(2)
        assert late.reject(1).status_hint == late.reject(2).status_hint == 503
        live.submit([seq_spec(3)], last)
        last.hear_ends(1)
        assert last.reject(3).code == "engine_failed"
        assert live.drain(WAIT_S)
