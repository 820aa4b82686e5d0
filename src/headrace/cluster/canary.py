"""Canaries: small requests of which all workers must know the same answer.

A worker that starts is asked one before it gets any request, and again when its engine has computed
nothing for a while. Decides which answer is right and when a worker has taken too long; refuses to
know how it is asked, or what becomes of one that fails. All times are of one monotonic clock.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from math import isfinite
from typing import TYPE_CHECKING, Final, TypeAlias

from headrace.cluster.fleet import BEGINNING, Cause, Slot
from headrace.cluster.wire import Canaried, Canary, Ready
from headrace.core.base.plan import WorkerSpec
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.config.cluster import ClusterConfig
from headrace.core.engine.stats import EngineStats

if TYPE_CHECKING:
    from headrace.cluster.process import WorkerProcess

PROMPT_TOKENS: Final = 40  # two whole blocks of 16, and a part of one
ANSWER_TOKENS: Final = 8
STRIDE: Final = 7919  # a prime: prompt tokens come from all of a vocabulary
AGAIN_NS: Final = Ns(NS_PER_S)  # until a worker that had no time for it is asked again

Question: TypeAlias = tuple[tuple[int, ...], int]  # prompt tokens, and how many to answer
Answer: TypeAlias = tuple[tuple[int, ...], tuple[float, ...]]  # tokens, and their logprobs


def question_for(spec: WorkerSpec) -> Question:
    """The same for all workers of a model, but for those that have hardly any KV."""
    room = min(spec.max_model_len, spec.num_blocks * spec.block_size)
    num_tokens = min(ANSWER_TOKENS, max(1, room // 4))
    length = max(1, min(PROMPT_TOKENS, room - num_tokens))
    return tuple((1 + STRIDE * i) % spec.vocab_size for i in range(length)), num_tokens


@dataclass(slots=True)
class _Jury:
    """What is right is what most workers have said; while it is a tie, what was said first."""

    right: Answer | None = None
    agreeing: set[str] = field(default_factory=set)  # names of workers that said so, ever
    others: dict[str, Answer] = field(default_factory=dict)  # what else a name has said, last

    def hear(self, name: str, answer: Answer) -> str:
        """What is wrong with it, for people; empty = nothing."""
        if not all(map(isfinite, answer[1])):
            return "a probability in its answer is no number"
        if self.right is None:
            self.right = answer
        if answer == self.right:
            self.agreeing.add(name)
            self.others.pop(name, None)
            return ""
        self.others[name] = answer
        saying = {name for name, other in self.others.items() if other == answer}
        if len(saying) > len(self.agreeing):
            self.right, self.agreeing = answer, saying
            self.others = {k: v for k, v in self.others.items() if v != answer}
            return ""
        return _difference(answer, self.right)


@dataclass(slots=True)
class _Life:
    """Of a worker that has said what it serves with."""

    slot: Slot
    ready: Ready
    question: Question
    jury: _Jury
    moved_ns: Ns  # when its engine was last seen to compute
    num_steps: int = 0
    is_trusted: bool = False
    said: Answer | None = None  # last
    asked_id: int | None = None  # of the canary that it has not answered
    asked_ns: Ns = BEGINNING  # first, since it has answered last
    again_ns: Ns | None = None  # when it is asked again whom it came at a bad time


class Canaries:
    """`ask` sends one to a worker."""

    def __init__(self, config: ClusterConfig, ask: Callable[[Slot, Canary], None]) -> None:
        self._is_on = config.canary
        self._every_ns = Ns(round(config.canary_every_s * NS_PER_S))
        self._timeout_ns = Ns(round(config.canary_timeout_s * NS_PER_S))
        self._ask = ask
        self._ids = count()
        self._lives: dict[WorkerProcess, _Life] = {}
        self._juries: dict[tuple[str, Question], _Jury] = {}  # also by what has to be alike

    def is_tried(self, slot: Slot) -> bool:
        """Whether it has to answer before it gets requests."""
        life = self._life(slot)
        return life is not None and not life.is_trusted

    # ---- what a worker does

    def begin(self, now: Ns, slot: Slot, ready: Ready) -> bool:
        """It is there: whether it has to answer first."""
        if not self._is_on:
            return False
        assert slot.process is not None
        question = question_for(ready.spec)
        jury = self._juries.setdefault((ready.kind, question), _Jury())
        life = _Life(slot, ready, question, jury, now)
        self._lives[slot.process] = life
        self._send(now, life)
        return True

    def note(self, now: Ns, slot: Slot, stats: EngineStats) -> None:
        """This is its state. Only steps show that it moves: a hung engine may admit requests."""
        life = self._life(slot)
        if life is not None and stats.num_steps != life.num_steps:
            life.num_steps, life.moved_ns = stats.num_steps, now
            if life.is_trusted:
                life.again_ns = None  # it is busy, and asked when it is quiet again

    def hear(self, now: Ns, slot: Slot, answer: Canaried) -> tuple[Cause, str] | Ready | None:
        """What follows from it: the worker is lost and why, or may have requests for the first
        time, or nothing.
        """
        life = self._life(slot)
        if life is None or answer.canary_id != life.asked_id:
            return None
        life.asked_id = None
        if answer.is_refused:
            return self._put_off(now, life, answer.fault)
        life.moved_ns = now
        if answer.fault:
            return Cause.CANARY_FAILED, f"its canary failed: {answer.fault}"
        life.said = (answer.tokens, answer.logprobs)
        if fault := self._judge(life):
            return Cause.CANARY_WRONG, f"its canary is wrong: {fault}"
        if life.is_trusted:
            return None
        life.is_trusted = True
        return life.ready

    def _put_off(self, now: Ns, life: _Life, why: str) -> tuple[Cause, str] | None:
        """One that hangs may have no room left; one that is busy moves."""
        if now >= max(life.asked_ns, life.moved_ns) + self._timeout_ns:
            return Cause.CANARY_FAILED, f"its canary was not accepted, last: {why}"
        life.again_ns = Ns(now + AGAIN_NS)
        return None

    def _judge(self, life: _Life) -> str:
        assert life.said is not None
        if not life.ready.spec.batch_invariant:
            # Its bytes may depend on what else runs; that it answers has to do.
            return "" if len(life.said[0]) == life.question[1] else "it is too short"
        return life.jury.hear(life.slot.name, life.said)

    # ---- time

    def turn(self, now: Ns, slots: Iterable[Slot]) -> Iterator[tuple[Slot, Cause, str]]:
        """Ask those that are quiet, and say who is lost: who does not answer, or has answered what
        most others do not.
        """
        living = {slot.process for slot in slots}
        for process in [process for process in self._lives if process not in living]:
            del self._lives[process]
        for life in list(self._lives.values()):
            due_ns = self._due_ns(life)
            if due_ns is not None and now >= due_ns:
                if life.asked_id is not None:
                    after_s = (now - life.moved_ns) / NS_PER_S
                    text = f"its engine has not moved for {after_s:.1f} s, and a canary waits there"
                    yield life.slot, Cause.CANARY_LATE, text
                    continue
                self._send(now, life)
            if life.is_trusted and (fault := self._is_outvoted(life)):
                yield life.slot, Cause.CANARY_WRONG, f"its canary is wrong: {fault}"

    def _is_outvoted(self, life: _Life) -> str:
        right = life.jury.right
        if right is None or life.said is None or life.said == right:
            return ""
        return _difference(life.said, right)

    def next_ns(self) -> Ns | None:
        """When there is something to do without a word from anybody; None = never."""
        due = (self._due_ns(life) for life in self._lives.values())
        return min((time for time in due if time is not None), default=None)

    def _due_ns(self, life: _Life) -> Ns | None:
        """When it has taken too long, or else when it is asked."""
        if life.asked_id is not None:
            return Ns(max(life.asked_ns, life.moved_ns) + self._timeout_ns)
        if life.slot.leaving is not None:
            return None
        if life.again_ns is not None:
            return life.again_ns
        if self._every_ns:
            return Ns(life.moved_ns + self._every_ns)
        return None

    def _send(self, now: Ns, life: _Life) -> None:
        if life.again_ns is None:
            life.asked_ns = now
        life.asked_id, life.again_ns = next(self._ids), None
        self._ask(life.slot, Canary(life.asked_id, *life.question))

    def _life(self, slot: Slot) -> _Life | None:
        return None if slot.process is None else self._lives.get(slot.process)


def _difference(answer: Answer, right: Answer) -> str:
    """The first one, for people."""
    (tokens, logprobs), (right_tokens, right_logprobs) = answer, right
    for index, (token, wanted) in enumerate(zip(tokens, right_tokens, strict=False)):
        if token != wanted:
            return f"token {index} of its answer is {token}, and {wanted} of the others'"
    for index, (logprob, wanted_logprob) in enumerate(zip(logprobs, right_logprobs, strict=False)):
        if logprob != wanted_logprob:
            return (
                f"token {index} of its answer has logprob {logprob:.9g}, and {wanted_logprob:.9g}"
                " in the others'"
            )
    return f"its answer has {len(tokens)} tokens, and {len(right_tokens)} the others'"
