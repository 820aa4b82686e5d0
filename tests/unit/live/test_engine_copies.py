"""An engine whose copies take long."""

import threading
from collections.abc import Sequence
from pathlib import Path

from headrace.adapters.movers.port import OnCopyDone
from headrace.core.base.events import (
    Arrive,
    Cancel,
    CopyDone,
    KvChange,
    StartCopy,
)
from headrace.core.base.request import FinishReason
from headrace.core.config.schema import WorkerConfig
from headrace.live.engine import LiveEngine
from headrace.live.event_log import EventLogReader
from support.live import WAIT_S, Ear, ManualExecutor, seq_spec, worker_spec


class EndlessMover:
    """Whose copies end when it closes."""

    address = "here"

    def __init__(self) -> None:
        self.copies: list[tuple[StartCopy, OnCopyDone]] = []
        self.has_begun = threading.Event()

    def publish(self, changes: Sequence[KvChange]) -> None:
        pass

    def start(self, copy: StartCopy, on_done: OnCopyDone) -> None:
        self.copies.append((copy, on_done))
        self.has_begun.set()

    def close(self) -> None:
        while self.copies:
            copy, on_done = self.copies.pop()
            on_done(CopyDone(copy.copy_id, 0, "the worker is ending"))


def test_an_engine_closes_though_a_copy_never_ends(tmp_path: Path) -> None:
    executor, mover, ear = ManualExecutor(worker_spec()), EndlessMover(), Ear()
    engine = LiveEngine(WorkerConfig(), executor, event_log=tmp_path / "log", mover=mover)
    engine.submit([seq_spec(0, (1,) * 40, kv_source="elsewhere")], ear)
    assert mover.has_begun.wait(WAIT_S)
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    ear.hear_ends(1)
    assert ear.finish(0).reason is FinishReason.CANCELLED
    assert executor.num_closed == 1
    engine.check()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pinned_blocks) == (0, 0, 0)
    with EventLogReader(tmp_path / "log") as frames:
        assert [type(frame.event) for frame in frames] == [Arrive, Cancel, CopyDone]
