"""A device that holds, instead of keys and values, what they stand for: the whole prefix of tokens
behind each slot.

Running a plan on it proves that every sequence reads exactly its own tokens' KV, whatever was
shared, copied, evicted or recomputed. The token it chooses is a function of the prefix alone, so
the right output is known without a schedule.
"""

from collections import deque
from hashlib import blake2b

from headrace.core.base.events import (
    Admitted,
    CallAt,
    CopyDone,
    Emit,
    EngineEffect,
    EngineEvent,
    Finish,
    Preempted,
    Reject,
    StartCopy,
    StartStep,
    StepDone,
    StepFailed,
    Timer,
)
from headrace.core.base.plan import (
    SeqResult,
    StepPlan,
    StepResult,
    TokenLogprob,
    WorkerSpec,
    settled,
)
from headrace.core.base.request import SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import BlockId, Ns, SeqId
from headrace.core.config.schema import KvConfig, SchedulerConfig, WorkerConfig
from headrace.core.cost.model import StepShape
from headrace.core.engine.build import build_worker

VOCAB = 50


class Prefixes:
    """What each prefix of a growing sequence of tokens is called: equal prefixes alike."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self._state = blake2b(digest_size=8)
        self.digests: list[bytes] = []  # by the position of the last token
        self.extend(tokens)

    def extend(self, tokens: tuple[int, ...]) -> None:
        for token in tokens:
            self._state.update(bytes((token,)))
            self.digests.append(self._state.digest())


def next_token(tokens: tuple[int, ...], params: SamplingParams) -> int:
    """The model: a token that depends on the prefix and the seed, on nothing else."""
    return blake2b(bytes(tokens) + params.seed.to_bytes(8, "little")).digest()[0] % VOCAB


def expected_output(spec: SeqSpec) -> tuple[int, ...]:
    tokens = spec.prompt_tokens
    output: tuple[int, ...] = ()
    while len(output) < spec.params.max_tokens:
        output += (next_token(tokens + output, spec.params),)
        stops = spec.params.stop_token_ids + (() if spec.params.ignore_eos else spec.eos_token_ids)
        if len(output) >= spec.params.min_tokens and output[-1] in stops:
            break
    return output


class LinearCost:
    """1 µs a step and 10 ns a token."""

    def step_ns(self, shape: StepShape) -> Ns:
        return Ns(1000 + 10 * shape.num_tokens)

    def copy_ns(self, num_bytes: int, link: str) -> Ns:
        return Ns(1 + num_bytes)


class FakeDevice:
    """KV memory of prefix digests, by block and slot."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._block_size = spec.block_size
        self._blocks: dict[BlockId, list[bytes]] = {}
        self._tokens: dict[SeqId, tuple[int, ...]] = {}
        self._prefixes: dict[SeqId, Prefixes] = {}
        self._sampled: dict[SeqId, int] = {}  # by the last step
        self.spoilt: set[SeqId] = set()  # their logits are no numbers

    def add(self, spec: SeqSpec) -> None:
        self._tokens[spec.seq_id] = tokens = spec.prompt_tokens + spec.output_tokens
        self._prefixes[spec.seq_id] = Prefixes(tokens)

    def block(self, block_id: BlockId) -> list[bytes]:
        """What it holds, slot by slot."""
        return list(self._slots(block_id))

    def write_block(self, block_id: BlockId, content: list[bytes]) -> None:
        self._slots(block_id)[:] = content

    def receive(self, copy: StartCopy, tokens: tuple[int, ...], num_blocks: int) -> None:
        """The first blocks of a copy arrive; `tokens` begin with those that they hold."""
        first = len(tokens) // self._block_size - len(copy.names)
        digests = Prefixes(tokens).digests
        for index, block_id in enumerate(copy.block_ids[:num_blocks], first):
            start = index * self._block_size
            self.write_block(block_id, digests[start : start + self._block_size])

    def run(self, plan: StepPlan) -> StepResult:
        plan = settled(plan, self._sampled)
        for copy in plan.copies:
            held = self._slots(copy.src)[: copy.num_tokens]
            self._slots(copy.dst)[: copy.num_tokens] = held
        for seq in plan.seqs:
            known = self._tokens[seq.seq_id]
            assert seq.tokens, "a share of no tokens"
            assert seq.tokens == known[seq.start : seq.start + len(seq.tokens)]
            digests = self._prefixes[seq.seq_id].digests
            for position in range(seq.start, seq.start + len(seq.tokens)):
                block, slot = divmod(position, self._block_size)
                self._slots(seq.block_ids[block])[slot] = digests[position]
        results = tuple(self._result(plan, i) for i in range(len(plan.seqs)))
        self._sampled = {result.seq_id: result.tokens[0] for result in results if result.tokens}
        results = tuple(
            SeqResult(result.seq_id, error="not a number")
            if result.seq_id in self.spoilt
            else result
            for result in results
        )
        return StepResult(plan.step_id, results, LinearCost().step_ns(StepShape.of(plan)))

    def _result(self, plan: StepPlan, index: int) -> SeqResult:
        seq = plan.seqs[index]
        known = self._tokens[seq.seq_id]
        end = seq.start + len(seq.tokens)
        digests = self._prefixes[seq.seq_id].digests
        for start in range(0, end, self._block_size):
            wanted = digests[start : min(end, start + self._block_size)]
            stored = self._slots(seq.block_ids[start // self._block_size])[: len(wanted)]
            assert stored == wanted, f"wrong KV after {start} tokens of {seq.seq_id}"
        scores: tuple[TokenLogprob, ...] = ()
        if seq.prompt_logprobs is not None:
            targets = seq.tokens[1:] + (
                () if seq.next_prompt_token is None else (seq.next_prompt_token,)
            )
            scores = tuple(TokenLogprob(token, -1.0, 0) for token in targets)
        if seq.sample is None:
            assert end < len(known)
            return SeqResult(seq.seq_id, prompt_logprobs=scores)
        assert end == len(known) == seq.sample.position
        token = next_token(known, seq.sample.params)
        self._tokens[seq.seq_id] = (*known, token)
        self._prefixes[seq.seq_id].extend((token,))
        return SeqResult(seq.seq_id, (token,), prompt_logprobs=scores)

    def _slots(self, block_id: BlockId) -> list[bytes]:
        """Of a block, empty where nothing has been written."""
        return self._blocks.setdefault(block_id, [b""] * self._block_size)


class Bench:
    """An EngineCore on a FakeDevice, stepped by hand; `core.check()` after every event."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 200,
        prefix_cache: bool = True,
        can_copy: bool = True,
        overlap: str = "off",
        **scheduler: object,
    ) -> None:
        self.spec = WorkerSpec(
            model_digest="fake",
            kv_dtype="bf16",
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            can_copy_blocks=can_copy,
        )
        config = WorkerConfig(
            scheduler=SchedulerConfig(overlap=overlap, **scheduler),  # type: ignore[arg-type]
            kv=KvConfig(prefix_cache=prefix_cache),
        )
        self.core = build_worker(config, self.spec, LinearCost())
        self.device = FakeDevice(self.spec)
        self.now = Ns(0)
        self.running: deque[StepPlan] = deque()
        self.has_failed = False  # the last step
        self.plans: list[StepPlan] = []
        self.copies: list[StartCopy] = []  # under way
        self.timers: list[tuple[Ns, int]] = []
        self.specs: dict[SeqId, SeqSpec] = {}
        self.output: dict[SeqId, tuple[int, ...]] = {}
        self.prompt_scores: dict[SeqId, tuple[TokenLogprob, ...]] = {}
        self.finished: dict[SeqId, Finish] = {}
        self.rejected: dict[SeqId, Reject] = {}
        self.admitted: list[Admitted] = []
        self.preempted: list[Preempted] = []

    @property
    def plan(self) -> StepPlan | None:
        """Of the step that runs."""
        return self.running[0] if self.running else None

    def seq(self, prompt: tuple[int, ...], **fields: object) -> SeqSpec:
        """A sequence with the next free id; `fields` are SamplingParams' or SeqSpec's."""
        own = {name: fields.pop(name) for name in list(fields) if name in SeqSpec.__struct_fields__}
        spec = SeqSpec(
            seq_id=SeqId(len(self.specs)),
            request_id=f"r{len(self.specs)}",
            prompt_tokens=prompt,
            params=SamplingParams(**fields),  # type: ignore[arg-type]
            **own,  # type: ignore[arg-type]
        )
        self.specs[spec.seq_id] = spec
        self.device.add(spec)
        return spec

    def handle(self, event: EngineEvent, *, after_ns: int = 10) -> list[EngineEffect]:
        self.now = Ns(self.now + after_ns)
        effects = list(self.core.handle(self.now, event))
        self.core.check()
        for effect in effects:
            match effect:
                case StartStep(plan):
                    assert plan.is_ahead == bool(self.running)
                    self.running.append(plan)
                    assert len(self.running) <= 2
                    self.plans.append(plan)
                case StartCopy():
                    self.copies.append(effect)
                case CallAt(at_ns, timer_id):
                    self.timers.append((at_ns, timer_id))
                case Emit(seq_id, tokens, _, scores):
                    self.output[seq_id] = self.output.get(seq_id, ()) + tokens
                    self.prompt_scores[seq_id] = self.prompt_scores.get(seq_id, ()) + scores
                case Finish():
                    assert effect.seq_id not in self.finished, "ended twice"
                    self.finished[effect.seq_id] = effect
                case Reject():
                    self.rejected[effect.seq_id] = effect
                case Admitted():
                    self.admitted.append(effect)
                case Preempted():
                    self.preempted.append(effect)
                case _:
                    pass
        return effects

    def step(self) -> list[EngineEffect]:
        """Carry out the planned step; one that was planned ahead of a step that failed fails."""
        assert self.running, "no step is planned"
        plan = self.running.popleft()
        if plan.is_ahead and self.has_failed:
            return self.handle(StepFailed(plan.step_id, "the step before has failed"))
        self.has_failed = False
        return self.handle(StepDone(self.device.run(plan)))

    def end_copy(self, num_blocks: int, *, seq_id: int) -> list[EngineEffect]:
        """The first blocks of the sequence's copy have come, and no more will."""
        copy = next(copy for copy in self.copies if copy.seq_id == seq_id)
        self.copies.remove(copy)
        spec = self.specs[SeqId(seq_id)]
        tokens = spec.prompt_tokens + spec.output_tokens
        size = self.spec.block_size
        num_asked = (len(tokens) - 1) // size
        if spec.num_source_blocks is not None:
            num_asked = min(num_asked, spec.num_source_blocks)
        self.device.receive(copy, tokens[: num_asked * size], num_blocks)
        error = "" if num_blocks == len(copy.names) else "broken off"
        return self.handle(CopyDone(copy.copy_id, num_blocks, error))

    def ring(self) -> list[EngineEffect]:
        """The next timer's time has come."""
        at_ns, timer_id = min(self.timers)
        self.timers.remove((at_ns, timer_id))
        return self.handle(Timer(timer_id), after_ns=max(10, at_ns - self.now))

    def fail_step(self) -> list[EngineEffect]:
        assert self.running, "no step is planned"
        plan = self.running.popleft()
        self.has_failed = True
        return self.handle(StepFailed(plan.step_id, "device on fire"))

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left to do; every sequence has ended then."""
        for _ in range(max_steps):
            if self.plan is None:
                assert self.core.is_idle, "stuck with work to do"
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def run_steps_only(self) -> None:
        """Step until no step is planned, whatever is left to do."""
        while self.plan is not None:
            self.step()

    def assert_outputs(self) -> None:
        """Every sequence that came to its natural end has the one right output."""
        for seq_id, finish in self.finished.items():
            if finish.reason in ("stop", "length"):
                assert self.output[seq_id] == expected_output(self.specs[seq_id])


def shares(plan: StepPlan | None) -> dict[int, int]:
    """Tokens of each sequence in the planned step."""
    assert plan is not None
    return {seq.seq_id: len(seq.tokens) for seq in plan.seqs}
