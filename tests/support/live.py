"""A live engine without a device: steps end when the test says so, or by themselves on a thread."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.adapters.executors.port import OnStepDone
from headrace.adapters.executors.sim import FakeSteps, StepSource
from headrace.core.base.events import (
    Admitted,
    Emit,
    EngineEffect,
    Finish,
    Reject,
    StepDone,
    StepFailed,
)
from headrace.core.base.plan import StepPlan, WorkerSpec
from headrace.core.base.request import SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import Ns, SeqId
from headrace.core.config.schema import SchedulerConfig, WorkerConfig
from headrace.live.engine import LiveEngine
from support.fake_device import LinearCost

WAIT_S = 20.0  # a bound for what should take no time at all


def worker_spec(
    *, num_blocks: int = 64, max_model_len: int = 256, vocab_size: int = 50
) -> WorkerSpec:
    return WorkerSpec(
        model_digest="00" * 32,
        kv_dtype="bf16",
        block_size=16,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
    )


class ManualExecutor:
    """Collects plans; `finish` ends the oldest. With `is_free` they end by themselves, on a thread
    of their own.
    """

    def __init__(
        self, spec: WorkerSpec, steps: StepSource | None = None, *, is_free: bool = False
    ) -> None:
        self.spec = spec
        self.steps = steps or FakeSteps(LinearCost(), spec.vocab_size)
        self.plans: queue.SimpleQueue[tuple[StepPlan, OnStepDone] | None] = queue.SimpleQueue()
        self.num_started = 0
        self.num_closed = 0
        self.on_start: Callable[[StepPlan], None] = lambda plan: None
        self._thread = threading.Thread(target=self._run, daemon=True)
        if is_free:
            self._thread.start()

    def release(self) -> None:
        """From here on steps end by themselves."""
        if self._thread.ident is None:
            self._thread.start()

    def start(self, plan: StepPlan, on_done: OnStepDone) -> None:
        self.on_start(plan)
        self.num_started += 1
        self.plans.put((plan, on_done))

    def next(self) -> StepPlan:
        """Wait for a step and end it."""
        item = self.plans.get(timeout=WAIT_S)
        assert item is not None
        plan, on_done = item
        on_done(self.outcome(plan))
        return plan

    def outcome(self, plan: StepPlan) -> StepDone | StepFailed:
        return self.steps.outcome(plan)[0]

    def close(self) -> None:
        self.num_closed += 1
        self.plans.put(None)
        self.release()
        self._thread.join()

    def _run(self) -> None:
        while (item := self.plans.get()) is not None:
            plan, on_done = item
            on_done(self.outcome(plan))


class Ear:
    """A sink that remembers, by sequence, and lets a test wait for the end."""

    def __init__(self) -> None:
        self.effects: queue.SimpleQueue[EngineEffect] = queue.SimpleQueue()
        self.tokens: dict[SeqId, tuple[int, ...]] = {}
        self.ends: dict[SeqId, Finish | Reject] = {}
        self.admitted: list[SeqId] = []

    def __call__(self, effect: EngineEffect) -> None:
        self.effects.put(effect)

    def hear(self) -> EngineEffect:
        effect = self.effects.get(timeout=WAIT_S)
        match effect:
            case Admitted(seq_id):
                self.admitted.append(seq_id)
            case Emit(seq_id, tokens):
                self.tokens[seq_id] = self.tokens.get(seq_id, ()) + tokens
            case Finish(seq_id) | Reject(seq_id):
                assert seq_id not in self.ends, "ended twice"
                self.ends[seq_id] = effect
        return effect

    def hear_ends(self, num: int) -> None:
        while len(self.ends) < num:
            self.hear()

    def finish(self, seq_id: int = 0) -> Finish:
        end = self.ends[SeqId(seq_id)]
        assert isinstance(end, Finish)
        return end

    def reject(self, seq_id: int = 0) -> Reject:
        end = self.ends[SeqId(seq_id)]
        assert isinstance(end, Reject)
        return end


@contextmanager
def live_engine(
    executor: ManualExecutor,
    *,
    event_log: Path | None = None,
    overlap: str = "off",
    **scheduler: object,
) -> Iterator[LiveEngine]:
    config = WorkerConfig(
        scheduler=SchedulerConfig(overlap=overlap, **scheduler)  # type: ignore[arg-type]
    )
    engine = LiveEngine(config, executor, event_log=event_log)
    try:
        yield engine
    finally:
        executor.release()
        engine.close()


def seq_spec(
    seq_id: int,
    prompt: tuple[int, ...] = (1, 2, 3),
    *,
    deadline_ns: int | None = None,
    kv_source: str = "",
    **params: object,
) -> SeqSpec:
    return SeqSpec(
        seq_id=SeqId(seq_id),
        request_id=f"r{seq_id}",
        prompt_tokens=prompt,
        params=SamplingParams(**params),  # type: ignore[arg-type]
        deadline_ns=None if deadline_ns is None else Ns(deadline_ns),
        kv_source=kv_source,
    )
