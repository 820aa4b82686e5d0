"""A recorded trace as a Source: its times, lengths and shared prefixes, with made-up tokens."""

from collections.abc import Iterable, Iterator, Sequence

from headrace.core.base.errors import ConfigError
from headrace.core.base.request import SeqSpec, Slo
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import NS_PER_S, Ns, SeqId
from headrace.core.workload.tokens import TokenBook
from headrace.core.workload.traces import TraceRequest

NO_LIMITS = Slo()


class TraceSource:
    """A Source. Blocks of the same name become the same tokens; a request without names shares
    nothing. `speed` 2 lets everything come in half the time.
    """

    has_follow_ups = False

    def __init__(
        self,
        requests: Iterable[TraceRequest],
        *,
        slo: Slo = NO_LIMITS,
        speed: float = 1.0,
        vocab_size: int = 1 << 15,
        seed: int = 0,
    ) -> None:
        """`requests` are in the order of their arrival."""
        if speed <= 0.0:
            raise ConfigError(f"speed is {speed:g}", hint="it is more than 0")
        self._requests = requests
        self._slo = slo
        self._speed = speed
        self._book = TokenBook(vocab_size, seed)

    def arrivals(self) -> Iterator[SeqSpec]:
        for index, request in enumerate(self._requests):
            yield SeqSpec(
                seq_id=SeqId(index),
                request_id=str(index),
                prompt_tokens=self._prompt(index, request),
                params=SamplingParams(max_tokens=max(1, request.output_tokens), ignore_eos=True),
                slo=self._slo,
                arrived_ns=Ns(round(request.arrival_s / self._speed * NS_PER_S)),
            )

    def follow_up(self, spec: SeqSpec, output: Sequence[int], now: Ns) -> SeqSpec | None:
        return None

    def _prompt(self, index: int, request: TraceRequest) -> tuple[int, ...]:
        tokens: list[int] = []
        for block in request.blocks:
            if len(tokens) >= request.prompt_tokens:
                break
            tokens += self._book.text(block, request.block_tokens)
        if (missing := request.prompt_tokens - len(tokens)) > 0:
            # Behind the blocks a text of its own, from the other end of the numbers.
            tokens += self._book.text(self._book.last - index, missing)
        return tuple(tokens[: request.prompt_tokens])
