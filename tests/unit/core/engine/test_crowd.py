"""L01: ten thousand wait, and a step costs what it would cost beside a few."""

import sys
from types import FrameType

from headrace.core.base.events import Arrive, EngineEvent, Reject, StartStep, StepDone
from headrace.core.base.types import Ns, SeqId
from support.fake_device import Bench

NUM_STEPS = 10


class Crowd:
    """A Bench's core without its checks, which look at everybody after each event."""

    def __init__(self, num_waiting: int) -> None:
        self.bench = Bench(max_waiting_seqs=num_waiting, max_running_seqs=2)
        self.rejects: list[Reject] = []
        self.now = Ns(0)
        for number in range(num_waiting + 3):
            spec = self.bench.seq((number % 50,), max_tokens=60)
            self.bench.device.add(spec)
            self.handle(Arrive((spec,)))

    def handle(self, event: EngineEvent) -> None:
        self.now = Ns(self.now + 10)
        for effect in self.bench.core.handle(self.now, event):
            if isinstance(effect, StartStep):
                self.bench.running.append(effect.plan)
            elif isinstance(effect, Reject):
                self.rejects.append(effect)

    def calls_of_steps(self) -> int:
        """What the core calls in some steps; their time would be a guess."""
        num_calls = 0

        def count(frame: FrameType, event: str, arg: object) -> None:
            nonlocal num_calls
            num_calls += event == "call" and "headrace/core" in frame.f_code.co_filename

        for _ in range(NUM_STEPS):
            result = self.bench.device.run(self.bench.running.popleft())
            sys.setprofile(count)
            try:
                self.handle(StepDone(result))
            finally:
                sys.setprofile(None)
        return num_calls


def test_ten_thousand_that_wait_do_not_slow_a_step() -> None:
    few, many = Crowd(100), Crowd(10_000)
    assert many.calls_of_steps() == few.calls_of_steps()
    # One ran when the others came, and of these two were too many: told at once when to come back.
    assert [reject.seq_id for reject in many.rejects] == [SeqId(10_001), SeqId(10_002)]
    assert {(reject.code, reject.status_hint) for reject in many.rejects} == {("queue_full", 429)}
    assert None not in {reject.retry_after_s for reject in many.rejects}
    stats = many.bench.core.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 9_999)
