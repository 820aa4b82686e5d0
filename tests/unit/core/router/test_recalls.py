"""What a worker that has fallen silent was to hand on, or was handed, goes elsewhere at once."""

from headrace.core.base.events import (
    Admitted,
    Arrive,
    Cancel,
    Emit,
    EndLease,
    Finish,
    Preempted,
)
from headrace.core.base.request import FinishReason, SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import Ns, SeqId, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import RouterConfig
from headrace.core.router.core import RouterCore
from headrace.core.router.events import WorkerDown, WorkerRole, WorkerUp
from headrace.core.router.flight import Word
from headrace.core.router.front import FrontCore
from headrace.core.router.front_events import (
    Forward,
    FrontEffect,
    FrontEvent,
    WorkerResumed,
    WorkerSaid,
    WorkerStalled,
)
from support.routing import spec

PREFILL, DECODE, OTHER = WorkerId(0), WorkerId(1), WorkerId(2)
SEQ = SeqId(0)


class Fronting:
    """A worker for prompts and some that decode; all of them on machines of these names."""

    def __init__(self, *roles: Role, machines: str = "") -> None:
        self.core = FrontCore(RouterCore(RouterConfig()), ClusterConfig(handoff="always"))
        for number, role in enumerate((Role.PREFILL, *roles)):
            self.tell(
                WorkerUp(
                    worker_id=WorkerId(number),
                    name=f"{role} {number}",
                    spec=spec(),
                    role=role,
                    machine=machines[number : number + 1],
                    kv_address=f"place {number}",
                    kv_block_bytes=1000,
                )
            )
        prompt = tuple(i % 90 + 1 for i in range(400))
        params = SamplingParams(max_tokens=20)
        one = SeqSpec(seq_id=SEQ, request_id="r", prompt_tokens=prompt, params=params)
        assert self.sent(self.tell(Arrive((one,)))) == [(PREFILL, "")]

    def tell(self, event: FrontEvent) -> list[FrontEffect]:
        effects = self.core.handle(Ns(0), event)
        self.core.check()
        return effects

    def say(self, worker_id: WorkerId, *words: Word) -> list[FrontEffect]:
        return self.tell(WorkerSaid(worker_id, words))

    def hand_over(self) -> list[FrontEffect]:
        """The prompt and its first token are there."""
        return self.say(PREFILL, Admitted(SEQ, 0), Emit(SEQ, (7,)), finish(FinishReason.LENGTH))

    def sent(self, effects: list[FrontEffect]) -> list[tuple[WorkerId, str]]:
        """Where the request goes, and where its KV may be copied from."""
        forwards = [one for one in effects if isinstance(one, Forward)]
        return [
            (one.worker_id, one.event.seqs[0].kv_source)
            for one in forwards
            if isinstance(one.event, Arrive)
        ]


def finish(reason: FinishReason) -> Finish:
    return Finish(
        seq_id=SEQ, reason=reason, num_prompt_tokens=400, num_output_tokens=1,
        num_cached_tokens=0, num_preemptions=0,
    )  # fmt: skip


def test_a_prompt_is_computed_where_it_is_decoded() -> None:
    fronting = Fronting(Role.DECODE)
    fronting.say(PREFILL, Admitted(SEQ, 0))
    effects = fronting.tell(WorkerStalled(PREFILL))
    assert fronting.sent(effects) == [(DECODE, "")]
    assert Forward(PREFILL, Cancel(SEQ)) in effects
    assert [one for one in effects if isinstance(one, Preempted)] != []
    assert (fronting.core.num_recalls, fronting.core.num_migrations) == (1, 0)
    # What it says late counts for nothing, and what it may hold for it is let go.
    assert fronting.say(PREFILL, Emit(SEQ, (9,))) == []
    late = fronting.say(PREFILL, finish(FinishReason.LENGTH))
    assert late == [Forward(PREFILL, EndLease(SEQ))]
    said = fronting.say(DECODE, Admitted(SEQ, 0), Emit(SEQ, (7,)))
    assert Emit(SEQ, (7,)) in said


def test_where_nobody_else_decodes_it_waits_until_somebody_does() -> None:
    fronting = Fronting(Role.DECODE)
    fronting.tell(WorkerDown(DECODE, "killed"))
    assert fronting.tell(WorkerStalled(PREFILL)) == []
    up = WorkerUp(worker_id=OTHER, name="d", spec=spec(), role=Role.DECODE)
    assert fronting.sent(fronting.tell(up)) == [(OTHER, "")]


def test_who_decodes_from_now_on_takes_what_nobody_else_could() -> None:
    fronting = Fronting(Role.DECODE)
    assert fronting.sent(fronting.hand_over()) == [(DECODE, "place 0")]
    assert fronting.tell(WorkerStalled(DECODE)) == []
    # It has computed the prompt itself.
    assert fronting.sent(fronting.tell(WorkerRole(PREFILL, Role.MIXED))) == [(PREFILL, "")]


def test_what_is_held_for_one_that_has_ended_elsewhere_meanwhile_is_let_go() -> None:
    fronting = Fronting(Role.DECODE)
    fronting.say(PREFILL, Admitted(SEQ, 0))
    assert fronting.sent(fronting.tell(WorkerStalled(PREFILL))) == [(DECODE, "")]
    fronting.say(DECODE, Admitted(SEQ, 0), Emit(SEQ, (7,)), finish(FinishReason.STOP))
    assert fronting.core.num_living == 0
    late = fronting.say(PREFILL, Emit(SEQ, (7,)), finish(FinishReason.LENGTH))
    assert late == [Forward(PREFILL, EndLease(SEQ))]


def test_what_was_handed_over_and_not_begun_goes_to_another_one() -> None:
    fronting = Fronting(Role.DECODE, Role.DECODE)
    ((first, source),) = fronting.sent(fronting.hand_over())
    second = OTHER if first == DECODE else DECODE
    assert source == "place 0"
    effects = fronting.tell(WorkerStalled(first))
    assert fronting.sent(effects) == [(second, "place 0")]
    assert Forward(first, Cancel(SEQ)) in effects


def test_what_is_decoded_stays() -> None:
    """A computation too many would cost more than a moment. Silence for long is a loss."""
    fronting = Fronting(Role.DECODE, Role.DECODE)
    ((first, _),) = fronting.sent(fronting.hand_over())
    fronting.say(first, Admitted(SEQ, 400), Emit(SEQ, (8,)))
    assert fronting.tell(WorkerStalled(first)) == []
    assert fronting.core.num_recalls == 0


def test_what_is_admitted_and_has_no_token_there_does_not_once() -> None:
    """Where it goes then, it stays, however long its prompt takes: it is not computed again."""
    fronting = Fronting(Role.DECODE, Role.DECODE)
    ((first, _),) = fronting.sent(fronting.hand_over())
    second = OTHER if first == DECODE else DECODE
    assert Forward(PREFILL, EndLease(SEQ)) in fronting.say(first, Admitted(SEQ, 400))
    effects = fronting.tell(WorkerStalled(first))
    assert fronting.sent(effects) == [(second, "")]
    assert Forward(first, Cancel(SEQ)) in effects
    assert any(isinstance(one, Preempted) for one in effects)
    fronting.say(second, Admitted(SEQ, 0))
    fronting.tell(WorkerResumed(first))
    assert fronting.tell(WorkerStalled(second)) == []
    assert fronting.core.num_recalls == 1


def test_the_memory_of_one_that_has_stalled_is_there_for_its_own_machine_only() -> None:
    for machines, source in (("aab", "place 0"), ("abb", ""), ("", "")):
        fronting = Fronting(Role.DECODE, machines=machines)
        fronting.tell(WorkerStalled(DECODE))
        assert fronting.sent(fronting.hand_over()) == [(DECODE, "place 0")]
        fronting.tell(WorkerStalled(PREFILL))
        up = WorkerUp(
            worker_id=OTHER, name="o", spec=spec(), role=Role.DECODE, machine=machines[1:2]
        )
        assert fronting.sent(fronting.tell(up)) == [(OTHER, source)]


def test_it_does_not_go_back_before_its_first_life_there_has_ended() -> None:
    """Words of the two could not be told apart."""
    fronting = Fronting(Role.DECODE, Role.DECODE)
    ((first, _),) = fronting.sent(fronting.hand_over())
    second = OTHER if first == DECODE else DECODE
    fronting.tell(WorkerStalled(first))
    fronting.tell(WorkerResumed(first))
    assert fronting.sent(fronting.tell(WorkerDown(second, "killed"))) == []
    assert fronting.core.num_unrouted == 1
    back = fronting.say(first, finish(FinishReason.CANCELLED))
    assert fronting.sent(back) == [(first, "place 0")]
    assert fronting.core.num_unrouted == 0


def test_nothing_new_goes_to_one_that_has_stalled() -> None:
    fronting = Fronting(Role.DECODE, Role.DECODE)
    fronting.tell(WorkerStalled(DECODE))
    for number in range(1, 6):
        params = SamplingParams(max_tokens=20)
        one = SeqSpec(
            seq_id=SeqId(number), request_id="", prompt_tokens=(number,) * 30, params=params
        )
        ((worker_id, _),) = fronting.sent(fronting.tell(Arrive((one,))))
        assert worker_id == PREFILL
    fronting.tell(WorkerStalled(PREFILL))
    assert {one.worker_id for one in fronting.core._flights.values()} == {OTHER}
