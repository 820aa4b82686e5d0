"""A TextEngine whose sequences say what a test wrote."""

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headrace.adapters.executors.sim import StepOutcome, lost_step
from headrace.core.base.events import StepDone
from headrace.core.base.plan import SeqResult, SeqStep, StepPlan, StepResult, TokenLogprob
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import Ns
from headrace.live.choice import ChoiceDelta
from headrace.live.generate import GenerateRequest, TextEngine
from headrace.live.port import Engine
from support.fake_engine import IM_END as EOS
from support.fake_engine import VOCAB_SIZE, byte_tokenizer
from support.live import WAIT_S, ManualExecutor, live_engine, worker_spec

CONTEXT = 256
PROMPT = tuple(b"say")


class Script:
    """Every sequence says `text`; its choices, where several are given, each their own."""

    def __init__(self, *texts: str) -> None:
        self._tokens = [[*text.encode(), EOS] for text in texts]

    def outcome(self, plan: StepPlan) -> StepOutcome:
        results = tuple(self._result(seq) for seq in plan.seqs)
        return StepDone(StepResult(plan.step_id, results, Ns(1))), Ns(1)

    def lost(self, plan: StepPlan) -> StepOutcome:
        return lost_step(plan)

    def _result(self, seq: SeqStep) -> SeqResult:
        if seq.sample is None:
            return SeqResult(seq.seq_id)
        tokens = self._tokens[seq.sample.params.choice % len(self._tokens)]
        token = tokens[min(seq.sample.position - len(PROMPT), len(tokens) - 1)]
        return SeqResult(seq.seq_id, (token,), (TokenLogprob(token, -1.0, 0),))


@contextmanager
def text_engine(
    *texts: str, is_free: bool = True, num_blocks: int = 64, **scheduler: Any
) -> Iterator[tuple[TextEngine, ManualExecutor]]:
    spec = worker_spec(vocab_size=VOCAB_SIZE, max_model_len=CONTEXT, num_blocks=num_blocks)
    executor = ManualExecutor(spec, Script(*texts), is_free=is_free)
    with live_engine(executor, **scheduler) as engine:
        yield (
            TextEngine(engine, byte_tokenizer(), max_model_len=CONTEXT, vocab_size=VOCAB_SIZE),
            executor,
        )


def request(
    prompt: Sequence[int] = PROMPT, *, max_tokens: int = 20, **fields: Any
) -> GenerateRequest:
    params = {
        name: fields.pop(name) for name in list(fields) if name in SamplingParams.__struct_fields__
    }
    return GenerateRequest(
        request_id="r",
        prompt_tokens=prompt,
        params=SamplingParams(max_tokens=max_tokens, **params),
        arrived_ns=Ns(time.monotonic_ns()),
        **fields,
    )


def texts_of(deltas: Sequence[ChoiceDelta]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for delta in deltas:
        texts[delta.index] = texts.get(delta.index, "") + delta.text
    return texts


async def collect(stream: AsyncIterator[ChoiceDelta]) -> list[ChoiceDelta]:
    return [delta async for delta in stream]


def assert_idle(engine: Engine) -> None:
    assert engine.drain(WAIT_S)
    engine.check()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pinned_blocks) == (0, 0, 0)
    assert engine.failure is None
