"""A model that computes nothing, to see what a server adds to the time that its tokens take.

    python -m headrace.bench.clocked PORT NUM_WORKERS    a server; 0 = all in one process
    python -m headrace.bench.clocked FD                  one of its workers

All is that of `headrace serve`, and the text that of the default model, but steps end on a clock,
whatever is in them, and each token is a moment: the first of an answer that at which its engine
heard of the request, the others those at which their steps ended.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

from headrace.adapters.executors.port import OnStepDone
from headrace.cluster.boot import BootedCluster, boot_cluster
from headrace.cluster.worker import main as work
from headrace.core.base.events import Arrive, EngineEffect, EngineEvent, StepDone
from headrace.core.base.plan import SeqResult, SeqStep, StepPlan, StepResult, WorkerSpec
from headrace.core.base.types import Ns, SeqId
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.resolve import MachineFacts
from headrace.core.config.schema import Config, SchedulerConfig
from headrace.live.boot import AsWorker, Booted, Progress, boot
from headrace.models.text.tokenizer import Tokenizer
from headrace.server.app import create_app
from headrace.server.listener import bind
from headrace.server.run import run_server
from headrace.server.service import Answerer

MODULE: Final = "headrace.bench.clocked"
PACE_S: Final = 0.1
STEP_NS: Final = Ns(1_000_000)  # what a step is said to take, so that nobody waits for room
STEP_TOKENS: Final = 2048
UNIT_NS: Final = 20_000  # of the moments that tokens are
NUM_MOMENTS: Final = 32_768  # that they tell apart: two thirds of a second


class Moments:
    """Tokens for the moments of the machine's monotonic clock, each with a text of its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        shown = (i for i in range(tokenizer.vocab_size) if _is_text(tokenizer, i))
        self._tokens = [token for token, _ in zip(shown, range(NUM_MOMENTS), strict=False)]
        self._units = {token: unit for unit, token in enumerate(self._tokens)}

    def token(self, moment_ns: int) -> int:
        return self._tokens[moment_ns // UNIT_NS % len(self._tokens)]

    def since_ns(self, token: int, now_ns: int) -> int:
        """How long its moment is past, if that is less than all that there are."""
        return (now_ns // UNIT_NS - self._units[token]) % len(self._tokens) * UNIT_NS


def _is_text(tokenizer: Tokenizer, token: int) -> bool:
    """Whether it goes out alone, at once."""
    text = tokenizer.bytes_of((token,), skip_special=True)
    return bool(text) and text.isascii()


class ClockedExecutor:
    """Steps end PACE_S apart, as long as there are any; before `begin` at once."""

    def __init__(self) -> None:
        self.spec = WorkerSpec(
            model_digest="00" * 32,
            kv_dtype="bf16",
            block_size=16,
            num_blocks=1 << 14,
            max_model_len=2048,
            vocab_size=1 << 17,
        )
        self._moments: Moments | None = None
        self._arrived: dict[SeqId, Ns] = {}  # those that have no token yet
        self._work: queue.SimpleQueue[tuple[StepPlan, OnStepDone] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="clocked", daemon=True)
        self._thread.start()

    def begin(self, moments: Moments) -> None:
        self._moments = moments

    def observe(self, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]) -> None:
        if isinstance(event, Arrive):
            self._arrived |= {spec.seq_id: now for spec in event.seqs}

    def start(self, plan: StepPlan, on_done: OnStepDone) -> None:
        self._work.put((plan, on_done))

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        due_s = 0.0
        while (asked := self._work.get()) is not None:
            plan, on_done = asked
            if self._moments is not None:
                now_s = time.monotonic()
                due_s = max(due_s, now_s - PACE_S / 2) + PACE_S
                time.sleep(max(0.0, due_s - now_s))
            now = Ns(time.monotonic_ns())
            results = tuple(self._result(seq, now) for seq in plan.seqs)
            on_done(StepDone(StepResult(plan.step_id, results, STEP_NS)))

    def _result(self, seq: SeqStep, now: Ns) -> SeqResult:
        if seq.sample is None:
            return SeqResult(seq.seq_id)
        moment_ns = self._arrived.pop(seq.seq_id, now)
        return SeqResult(seq.seq_id, (self._moments.token(moment_ns) if self._moments else 0,))


def boot_clocked(
    config: Config,
    *,
    machine: MachineFacts | None = None,
    on_progress: Progress | None = None,
    worker: AsWorker | None = None,
) -> Booted:
    """As `boot`, over an executor of this kind."""
    executor = ClockedExecutor()
    booted = boot(
        config, machine=machine, on_progress=on_progress, executor=executor, worker=worker
    )
    executor.begin(Moments(booted.loaded.tokenizer))
    booted.engine.observe(executor.observe)
    return booted


def serve(port: int, num_workers: int) -> None:
    config = Config(
        scheduler=SchedulerConfig(step_tokens=STEP_TOKENS, budget="fixed"),
        # Nobody answers a canary with the tokens of another one.
        cluster=ClusterConfig(workers=num_workers or 1, canary=False),
    )
    with ExitStack() as stack:

        def start() -> Answerer:
            make: Callable[[Config], Booted | BootedCluster] = boot_clocked
            if num_workers:
                make = partial(boot_cluster, worker_module=MODULE)
            booted = make(config)
            stack.callback(booted.close)
            return booted

        listener = bind("127.0.0.1", port)
        run_server(create_app(None, config.server), config.server, listener=listener, boot=start)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        serve(int(sys.argv[1]), int(sys.argv[2]))
    else:
        work(boot_clocked)
