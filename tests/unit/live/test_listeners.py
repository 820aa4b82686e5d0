"""Who hears what, and the last words where the core can give none."""

from headrace.core.base.events import Admitted, Arrive, Emit, EngineEffect, Finish, Preempted
from headrace.core.base.request import FinishReason
from headrace.core.base.types import Ns, SeqId
from headrace.core.telemetry.counters import Counters
from headrace.live.listeners import Listeners
from support.live import Ear, seq_spec


def test_last_words_add_up_with_what_was_said_before() -> None:
    listeners, counters, ear = Listeners(lambda seq_id: None), Counters(), Ear()
    listeners.observe(lambda now, event, effects: counters.observe(event, effects))
    specs = (seq_spec(0), seq_spec(1), seq_spec(2))
    listeners.add(specs, ear)
    said: list[EngineEffect] = [
        Admitted(SeqId(0), 16),
        Emit(SeqId(0), (1, 2)),
        Preempted(SeqId(0), "room", 5),
        Admitted(SeqId(0), 0),
        Emit(SeqId(0), (3,)),
        Admitted(SeqId(1), 0),
    ]
    listeners.tell(Ns(1), Arrive(specs), said)
    nobody = SeqId(7)
    listeners.end([*listeners.living(), nobody], Ns(2), Arrive(()), "all is lost")
    ear.hear_ends(3)
    num_prompt = len(specs[0].prompt_tokens)
    assert ear.finish(0) == Finish(
        SeqId(0), FinishReason.ERROR, num_prompt, 3, 16, 1, error="all is lost"
    )
    assert ear.finish(1) == Finish(
        SeqId(1), FinishReason.ERROR, num_prompt, 0, 0, 0, error="all is lost"
    )
    counters.check()
    assert counters.num_finished[FinishReason.ERROR] == 3
    assert counters.num_output_tokens == 3
    assert listeners.num_living == 0
