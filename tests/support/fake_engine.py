"""A model that is a formula, behind the real engine: every layer of the server runs, and every
answer is known.

The next token depends on the token before it, on its position, on the seed and on the choice: not
on any schedule.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from headrace.adapters.executors.port import OnStepDone
from headrace.core.base.events import StepDone, StepFailed
from headrace.core.base.plan import (
    SampleSpec,
    SeqResult,
    SeqStep,
    StepPlan,
    StepResult,
    TokenLogprob,
    WorkerSpec,
    settled,
)
from headrace.core.base.types import Ns, SeqId
from headrace.core.base.worker import Role
from headrace.core.config.schema import KvConfig, SchedulerConfig, WorkerConfig
from headrace.core.workload.recording import Begin, PoolFacts
from headrace.live.engine import LiveEngine
from headrace.live.generate import TextEngine
from headrace.live.step_fit import StepFit
from headrace.live.traffic import Facts
from headrace.models.text.template import ChatTemplate
from headrace.models.text.template_wire import Limits
from headrace.models.text.tokenizer import Tokenizer

IM_START, IM_END, NUM_BYTES = 256, 257, 256
VOCAB_SIZE = 258
MODEL_NAME = "formula"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if shout is defined %}{{ shout }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz "


def byte_tokenizer() -> Tokenizer:
    """Token i is byte i; two special tokens follow."""
    chars = _chars_of_bytes()
    library = tokenizers.Tokenizer(
        models.BPE(vocab={char: byte for byte, char in enumerate(chars)}, merges=[])
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(library, eos_token_ids=[IM_END])


def _chars_of_bytes() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(b) if b in printable else chr(0x100 + others.index(b)) for b in range(256)]


Formula = Callable[[int, SampleSpec], int]


def lower_case(last: int, sample: SampleSpec) -> int:
    """Letters and spaces; never the end of text."""
    params = sample.params
    seed = 0 if params.temperature == 0 else params.seed
    text = f"{last} {sample.position} {seed} {params.choice if seed else 0}"
    return ord(LETTERS[blake2b(text.encode()).digest()[0] % len(LETTERS)])


def saying(text: str, num_prompt: int) -> Formula:
    """The given text after a prompt of known length, then the end of text."""
    tokens = [*text.encode(), IM_END]
    return lambda last, sample: tokens[min(sample.position - num_prompt, len(tokens) - 1)]


class FormulaExecutor:
    """Runs steps on a thread of its own. `gate` cleared = steps wait; `fails` = steps fail."""

    def __init__(
        self, formula: Formula = lower_case, *, num_blocks: int = 512, max_model_len: int = 2048
    ):
        self.formula = formula
        self.step_s = 0.0
        self.fails = False
        self.gate = threading.Event()
        self.gate.set()
        self.num_steps = 0
        self.spec = WorkerSpec(
            model_digest="00" * 32,
            kv_dtype="bf16",
            block_size=16,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
        )
        self._work: list[tuple[StepPlan, OnStepDone]] = []
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="formula", daemon=True)
        self._thread.start()

    def start(self, plan: StepPlan, on_done: OnStepDone) -> None:
        with self._changed:
            self._work.append((plan, on_done))
            self._changed.notify()

    def close(self) -> None:
        self.gate.set()
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        sampled: dict[SeqId, int] | None = None  # by the last step; None = it failed
        while True:
            with self._changed:
                while not self._work:
                    if self._is_closed:
                        return
                    self._changed.wait()
                plan, on_done = self._work.pop(0)
            self.gate.wait()
            if self.step_s:
                time.sleep(self.step_s)
            self.num_steps += 1
            if self.fails or (plan.is_ahead and sampled is None):
                sampled = None
                on_done(StepFailed(plan.step_id, "told to fail"))
            else:
                results = tuple(self._result(seq) for seq in settled(plan, sampled or {}).seqs)
                sampled = {result.seq_id: result.tokens[0] for result in results if result.tokens}
                on_done(StepDone(StepResult(plan.step_id, results, Ns(1000))))

    def _result(self, seq: SeqStep) -> SeqResult:
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if seq.prompt_logprobs is not None:
            following = list(seq.tokens[1:])
            if seq.next_prompt_token is not None:
                following.append(seq.next_prompt_token)
            prompt_logprobs = tuple(_logprob(t, seq.prompt_logprobs) for t in following)
        if seq.sample is None:
            return SeqResult(seq.seq_id, prompt_logprobs=prompt_logprobs)
        sample = seq.sample
        biased = [token for token, bias in sample.params.logit_bias if bias >= 100]
        token = biased[0] if biased else self.formula(seq.tokens[-1], sample)
        if token in sample.banned:
            token = ord("x")
        wanted = sample.params.logprobs
        logprobs = () if wanted is None else (_logprob(token, wanted),)
        return SeqResult(seq.seq_id, (token,), logprobs, prompt_logprobs)


def _logprob(token: int, num_top: int) -> TokenLogprob:
    """The chosen token is the second likeliest."""
    others = [(token + i) % NUM_BYTES for i in (1, 0, 2, 3, 4, 5)]
    top = tuple((other, -0.5 * (i + 1)) for i, other in enumerate(others[:num_top]))
    return TokenLogprob(token, -1.0, 1, top)


@dataclass(frozen=True)
class FakeBooted:
    """What the server uses of a booted model."""

    name: str
    engine: LiveEngine
    text_engine: TextEngine
    chat_template: ChatTemplate | None
    executor: FormulaExecutor
    config: WorkerConfig
    step_fit: StepFit
    identity: str = "formula"

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text_engine.tokenizer

    def facts(self) -> Facts:
        begin = Begin(block_tokens=self.executor.spec.block_size, is_alone=True)
        return Facts(begin=begin, look=self._pool_facts)

    def _pool_facts(self) -> tuple[PoolFacts, ...]:
        return (
            PoolFacts(
                role=Role.MIXED,
                num_workers=1,
                spec=self.executor.spec,
                config=self.config,
                cost=self.step_fit.cost(),
                kv_block_bytes=1024,
            ),
        )


@contextmanager
def formula_model(
    formula: Formula = lower_case,
    *,
    num_blocks: int = 512,
    max_model_len: int = 2048,
    scheduler: SchedulerConfig | None = None,
    has_template: bool = True,
    template_source: str = TEMPLATE,
    limits: Limits | None = None,
) -> Iterator[FakeBooted]:
    executor = FormulaExecutor(formula, num_blocks=num_blocks, max_model_len=max_model_len)
    config = WorkerConfig(scheduler=scheduler or SchedulerConfig(), kv=KvConfig())
    engine = LiveEngine(config, executor)
    step_fit = StepFit(engine.cost)
    engine.observe(step_fit.observe)
    template = ChatTemplate(template_source, bos_token="", eos_token="<|im_end|>", limits=limits)
    try:
        tokenizer = byte_tokenizer()
        text_engine = TextEngine(
            engine, tokenizer, max_model_len=max_model_len, vocab_size=VOCAB_SIZE
        )
        shown = template if has_template else None
        yield FakeBooted(MODEL_NAME, engine, text_engine, shown, executor, config, step_fit)
    finally:
        executor.gate.set()
        engine.close()
        template.close()
