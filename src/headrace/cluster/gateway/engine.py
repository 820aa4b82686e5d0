"""One engine as the gateway sees it: whether it is up, what it serves, and the calls on their way
to it.
"""

from typing import Final, Protocol

from headrace.cluster.gateway.addresses import Address
from headrace.cluster.gateway.ask import TOKENS_PER_BLOCK
from headrace.core.base.plan import WorkerSpec
from headrace.core.base.types import NS_PER_S, Ns, WorkerId
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.cost.formula import KNOTS
from headrace.core.router.events import WorkerUp

UNKNOWN: Final = 1 << 40  # size of what an engine does not tell: it admits by itself
STEP_TOKENS: Final = 8192
MAX_REST_S: Final = 30.0
LEAST_STEP_NS: Final = 1e7  # of a step that does next to nothing


class Losable(Protocol):
    """A call that waits for an engine's bytes."""

    heard_ns: Ns  # when it last had some

    def lose(self, reason: str) -> None:
        """Wait no longer. Idempotent."""
        ...


class Engine:
    """`worker_id` changes with each time that it comes up; None while it is down."""

    def __init__(self, address: Address, prefill_tokens_per_s: float) -> None:
        self.address = address
        self.worker_id: WorkerId | None = None
        self.models: tuple[str, ...] = ()  # as it said last, also when it is down
        self.was_ever_up = False
        self.reason = "not asked yet"  # why it is down
        self.calls: set[Losable] = set()
        self.heard_ns = Ns(0)  # when any of them had bytes last
        self.num_faults = 0
        self._cost = _cost(prefill_tokens_per_s)
        self._rests_until = Ns(0)

    @property
    def name(self) -> str:
        return self.address.name

    @property
    def is_up(self) -> bool:
        return self.worker_id is not None

    def serves(self, model: str) -> bool:
        return not model or model in self.models

    def rest(self, now: Ns, retry_after_s: float) -> None:
        """It has asked to be left alone."""
        rest_ns = round(min(retry_after_s, MAX_REST_S) * NS_PER_S)
        self._rests_until = max(self._rests_until, Ns(now + rest_ns))

    def rests(self, now: Ns) -> bool:
        return now < self._rests_until

    def come_up(self, worker_id: WorkerId) -> WorkerUp:
        self.worker_id = worker_id
        self.was_ever_up = True
        self.reason = ""
        self._rests_until = Ns(0)
        return WorkerUp(
            worker_id=worker_id,
            name=self.name,
            spec=WorkerSpec(
                model_digest="",
                kv_dtype="",
                block_size=TOKENS_PER_BLOCK,
                num_blocks=UNKNOWN,
                max_model_len=UNKNOWN,
                vocab_size=0,
            ),
            step_tokens=STEP_TOKENS,
            max_running_seqs=UNKNOWN,
            cost=self._cost,
            publishes_kv=bool(self.address.kv_events),
            # To a router, a model's name is to an engine what an adapter's is to a worker.
            adapters=self.models,
        )

    def lose_calls(self, reason: str, silent_since_ns: Ns) -> None:
        """Give up all calls that have heard nothing since then."""
        for call in list(self.calls):
            if call.heard_ns <= silent_since_ns:
                call.lose(reason)


def _cost(prefill_tokens_per_s: float) -> FittedCostModel:
    """Of an engine of which only this is known; decoding costs what accelerators make of it."""
    token_ns = NS_PER_S / prefill_tokens_per_s
    return FittedCostModel(
        name="stated prefill speed",
        knot_ns=tuple(LEAST_STEP_NS + num_tokens * token_ns for num_tokens in KNOTS),
        seq_ns=2e4,
        logit_row_ns=0.0,
        attention_pair_ns=0.0,
        kv_token_ns=60.0,
    )
