"""A worker's answer to a canary: its engine computes it as it would a request.

Decides nothing about what the answer is worth; refuses to tell anybody but the front end that asks.
"""

from collections.abc import Callable

from headrace.cluster.wire import Canaried, Canary
from headrace.core.base.events import Emit, EngineEffect, Finish, Reject
from headrace.core.base.request import FinishReason, SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import SeqId
from headrace.live.engine import LiveEngine

SALT = "canary"  # its blocks are nobody else's, and the next one finds them


class CanaryAnswer:
    """The answer to one canary. `tell` is called once, on the engine's thread."""

    def __init__(self, asked: Canary, tell: Callable[[Canaried], None]) -> None:
        self._asked = asked
        self._tell = tell
        self._tokens: list[int] = []
        self._logprobs: list[float] = []

    def begin(self, engine: LiveEngine) -> None:
        asked = self._asked
        (number,) = engine.next_seq_ids(1)
        spec = SeqSpec(
            seq_id=SeqId(number),
            request_id=f"canary-{asked.canary_id}",
            prompt_tokens=asked.prompt_tokens,
            params=SamplingParams(
                temperature=0.0, max_tokens=asked.num_tokens, ignore_eos=True, logprobs=0
            ),
            salt=SALT,
        )
        engine.submit([spec], self._hear)

    def _hear(self, effect: EngineEffect) -> None:
        canary_id = self._asked.canary_id
        match effect:
            case Emit(_, tokens, logprobs):
                self._tokens += tokens
                self._logprobs += [one.logprob for one in logprobs]
            case Reject():
                self._tell(Canaried(canary_id, fault=effect.message, is_refused=True))
            case Finish(_, FinishReason.LENGTH):
                self._tell(Canaried(canary_id, tuple(self._tokens), tuple(self._logprobs)))
            case Finish():
                is_refused = effect.reason is FinishReason.CANCELLED
                fault = effect.error or f"it ended with {effect.reason}"
                self._tell(Canaried(canary_id, fault=fault, is_refused=is_refused))
            case _:
                pass
