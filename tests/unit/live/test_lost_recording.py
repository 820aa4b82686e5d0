"""What an operator hears where a recording cannot go on."""

from pathlib import Path

import pytest

from headrace.core.base.request import FinishReason
from support.live import Ear, ManualExecutor, live_engine, seq_spec, worker_spec


@pytest.fixture
def executor() -> ManualExecutor:
    return ManualExecutor(worker_spec())


def test_a_full_disk_ends_the_event_log_with_one_line(
    executor: ManualExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    with live_engine(executor, event_log=Path("/dev/full")) as engine:
        # More than the file's buffer holds, and than the engine takes.
        engine.submit([seq_spec(0, prompt=tuple(range(9000)))], Ear())
        ear = Ear()
        engine.submit([seq_spec(1, max_tokens=1)], ear)
        executor.next()
        executor.release()
        ear.hear_ends(1)
        assert ear.finish(1).reason is FinishReason.LENGTH
        engine.check()
        assert engine.failure is None
    (record,) = [one for one in caplog.records if one.levelname == "ERROR"]
    assert record.exc_info is None
    assert record.message == (
        "the event log has ended: cannot write /dev/full: no space left on device; serving goes on"
        " without it; to have one again, make room or name another file and start again"
    )
