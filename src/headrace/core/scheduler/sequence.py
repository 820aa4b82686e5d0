"""A sequence inside the engine: what is known of it, how much of that is computed, which state it
is in.
"""

from enum import Enum

from headrace.core.base.errors import InvariantError
from headrace.core.base.plan import SeqStep, TokenLogprob
from headrace.core.base.request import FinishReason, SeqSpec
from headrace.core.base.types import Ns, SeqId
from headrace.core.kv.names import BlockChain


class State(Enum):
    WAITING = "waiting"  # holds no blocks
    RUNNING = "running"  # holds blocks
    FINISHED = "finished"


NEXT = {
    State.WAITING: {State.RUNNING, State.FINISHED},
    State.RUNNING: {State.WAITING, State.FINISHED},  # WAITING again = preempted
    State.FINISHED: set[State](),
}


class Sequence:
    """Known tokens are prompt + output; a step lets `num_computed` catch up with them."""

    __slots__ = (
        "chain",
        "ending",
        "epoch",
        "first_num_cached",
        "is_long",
        "num_computed",
        "num_failures",
        "num_in_flight",
        "num_pending",
        "num_planned",
        "num_preemptions",
        "num_prompt",
        "num_scored",
        "num_times_victim",
        "order",
        "promised_tokens",
        "queue_key",
        "queued_ns",
        "seq_id",
        "spec",
        "state",
        "tokens",
    )

    def __init__(self, spec: SeqSpec, order: int, now: Ns, chain: BlockChain) -> None:
        self.spec = spec
        self.seq_id: SeqId = spec.seq_id
        self.order = order  # of arrival; kept through preemptions
        self.queue_key: tuple[float, int] = (0.0, order)  # its place among its like
        self.queued_ns = now  # when it began to wait, last
        self.tokens = [*spec.prompt_tokens, *spec.output_tokens]
        self.num_prompt = len(spec.prompt_tokens)
        self.num_computed = 0
        self.first_num_cached: int | None = None
        self.num_preemptions = 0
        self.num_times_victim = 0  # preemptions for want of room, of which each has only so many
        self.num_failures = 0
        self.num_scored = 0  # prompt tokens, from the second on, whose log probability is known
        self.promised_tokens = 0  # length up to which admission promised blocks
        self.is_long = False  # since it was looked at for a step, until its prompt is computed
        # While steps run that it is part of, the plan is ahead of what is known:
        self.num_in_flight = 0  # such steps
        self.num_planned = 0  # tokens computed when they are done
        self.num_pending = 0  # tokens that they sample
        self.epoch = 0  # what ran before its last preemption means nothing to it
        self.ending: FinishReason | None = None  # to end when the oldest such step is done
        self.state = State.WAITING
        self.chain = chain
        chain.extend(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def length(self) -> int:
        """Tokens when all running steps are done."""
        return len(self.tokens) + self.num_pending

    @property
    def num_remaining(self) -> int:
        """Tokens that are not computed even when all running steps are done."""
        return len(self.tokens) + self.num_pending - self.num_planned

    @property
    def goes_on(self) -> bool:
        """Whether it needs more steps than those that run, as far as can be known."""
        return self.ending is None and not (self.num_pending and self.length >= self.max_len)

    @property
    def max_len(self) -> int:
        return self.num_prompt + self.spec.params.max_tokens

    @property
    def wants_scores(self) -> bool:
        """Whether log probabilities of prompt tokens are asked for and not all known."""
        return (
            self.spec.params.prompt_logprobs is not None and self.num_scored < self.num_prompt - 1
        )

    @property
    def reusable_tokens(self) -> int:
        """Leading tokens whose KV may come from the cache.

        The last known token is always computed, since its logits choose the next one; so is the
        first prompt token whose logits score another one and all behind it.
        """
        return self.num_scored if self.wants_scores else len(self.tokens) - 1

    def take_scores(self, start: int, scores: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
        """Those of a share's scores that were not told before a preemption."""
        fresh = scores[max(0, self.num_scored - start) :]
        self.num_scored += len(fresh)
        return fresh

    def launch(self, share: SeqStep) -> None:
        """A step with this share of it starts, or will as soon as the running one is done."""
        self.num_in_flight += 1
        self.num_planned += len(share.tokens)
        self.num_pending += share.sample is not None

    def land(self, share: SeqStep, sampled: tuple[int, ...]) -> None:
        """The step with this share is done."""
        self.num_in_flight -= 1
        self.num_computed += len(share.tokens)
        self.num_pending -= share.sample is not None
        for token in sampled:
            self.append(token)

    def reset(self, num_computed: int = 0) -> None:
        """Nothing is computed beside what the cache holds, and nothing that runs counts."""
        self.num_computed = self.num_planned = num_computed
        self.num_in_flight = self.num_pending = 0
        self.epoch += 1

    def move(self, state: State) -> None:
        if state not in NEXT[self.state]:
            raise InvariantError(
                "illegal move of a sequence", seq_id=self.seq_id, old=self.state, new=state
            )
        self.state = state

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if len(self.tokens) % self.chain.block_size == 0:
            self.chain.extend(self.tokens)
