"""Requests by description: sessions of people, tool loops of agents, single questions.

A session is a conversation: each request has the whole history as its prompt, and follows the
answer before it after a pause. An agent is a session whose pauses are its tools' times.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from math import ceil
from random import Random

import msgspec

from headrace.core.base.errors import ConfigError
from headrace.core.base.request import SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import NS_PER_S, Ns, SeqId
from headrace.core.workload.arrivals import Arrivals
from headrace.core.workload.profiles import WorkloadProfile
from headrace.core.workload.tokens import TokenBook

MAX_FACTOR = 8.0  # no length is more than this many times its mean


class Synthetic(msgspec.Struct, frozen=True, kw_only=True):
    """A profile, how often it comes, and how much it varies."""

    profile: WorkloadProfile
    arrivals: Arrivals  # of requests; a session's first one comes as often as its turns demand
    num_requests: int
    prompt_spread: float = 0.6  # standard deviation over mean, of what is new in a prompt
    output_spread: float = 1.0
    num_prefixes: int = 1  # different beginnings that sessions share
    max_tokens: int = 1 << 17  # prompt and output; a session ends before it would be longer
    vocab_size: int = 1 << 15
    seed: int = 0


class SessionShape(msgspec.Struct, frozen=True, kw_only=True):
    """Mean tokens of the parts that prompts are made of."""

    shared: float  # the beginning that others have too
    new: float  # each request brings

    @classmethod
    def of(cls, profile: WorkloadProfile) -> "SessionShape":
        """Parts that give the profile's mean prompt, and its shared share as far as can be: where
        histories alone are more than that, nothing else is shared.

        Request k of n has shared + k · new + (k - 1) · output tokens.
        """
        turns, prompt, output = profile.turns, profile.prompt_tokens, profile.output_tokens
        history = (turns - 1) / 2
        new = (1.0 - profile.shared_share) * prompt
        shared = profile.shared_share * prompt - history * (new + output)
        if shared < 0.0:
            shared = 0.0
            new = (prompt - history * output) / (history + 1)
        if new < 1.0:
            raise ConfigError(
                f"{turns} turns of {output} output tokens make longer prompts than {prompt} tokens",
                hint="fewer turns, less output or a longer prompt",
            )
        return cls(shared=shared, new=new)


class _Session:
    """`rng` is its own, so that it says the same whenever it is answered."""

    __slots__ = ("number", "prompt", "rng", "turn")

    def __init__(self, number: int, rng: Random, prompt: tuple[int, ...]) -> None:
        self.number = number
        self.rng = rng
        self.prompt = prompt
        self.turn = 0


class SyntheticSource:
    """A Source. The same description asks the same, whoever answers and when; what the answers say
    is part of what follows them.
    """

    def __init__(self, workload: Synthetic) -> None:
        self._workload = workload
        self._profile = workload.profile
        self._shape = SessionShape.of(workload.profile)
        self._book = TokenBook(workload.vocab_size, workload.seed)
        self._sessions: dict[SeqId, _Session] = {}  # by the request that is under way
        self.has_follow_ups = workload.profile.turns > 1

    def arrivals(self) -> Iterator[SeqSpec]:
        workload, turns = self._workload, self._profile.turns
        rng = Random(f"{workload.seed}/arrivals")
        times = workload.arrivals.scaled(1.0 / turns).seconds(rng)
        for number, second in enumerate(islice(times, ceil(workload.num_requests / turns))):
            own = Random(f"{workload.seed}/{number}")
            prefix = own.randrange(workload.num_prefixes)
            session = _Session(number, own, self._book.text(prefix, round(self._shape.shared)))
            yield self._ask(session, Ns(round(second * NS_PER_S)))

    def follow_up(self, spec: SeqSpec, output: Sequence[int], now: Ns) -> SeqSpec | None:
        session = self._sessions.pop(spec.seq_id, None)
        if session is None or not output:
            return None
        session.prompt += tuple(output)
        pause_s = session.rng.expovariate(1.0) * self._profile.pause_s
        if len(session.prompt) + 1 >= self._workload.max_tokens:
            return None
        return self._ask(session, Ns(now + round(pause_s * NS_PER_S)))

    def _ask(self, session: _Session, at_ns: Ns) -> SeqSpec:
        """Its next request; what would be too long is cut."""
        workload, turns, rng = self._workload, self._profile.turns, session.rng
        number = session.number * turns + session.turn
        num_new = _draw(rng, self._shape.new, workload.prompt_spread)
        num_output = _draw(rng, self._profile.output_tokens, workload.output_spread)
        new = self._book.text(workload.num_prefixes + number, num_new)
        session.prompt = (session.prompt + new)[: workload.max_tokens - 1]
        session.turn += 1
        if session.turn < turns:
            self._sessions[SeqId(number)] = session
        num_output = min(num_output, workload.max_tokens - len(session.prompt))
        return SeqSpec(
            seq_id=SeqId(number),
            request_id=f"{session.number}.{session.turn}",
            prompt_tokens=session.prompt,
            params=SamplingParams(max_tokens=num_output, ignore_eos=True),
            slo=self._profile.slo,
            arrived_ns=at_ns,
        )


def _draw(rng: Random, mean: float, spread: float) -> int:
    """A length of 1 or more, gamma distributed."""
    if spread <= 0.0:
        return max(1, round(mean))
    shape = 1.0 / spread**2
    return max(1, round(min(MAX_FACTOR * mean, rng.gammavariate(shape, mean / shape))))
