"""A request that is handed on, and lost: what it costs wherever it goes next."""

from headrace.core.base.events import Admitted, Emit, Finish
from headrace.core.base.request import FinishReason, SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import SeqId, WorkerId
from headrace.core.router.flight import Flight

PREFILL, DECODE = WorkerId(0), WorkerId(1)
WEIGHT = 0.1
PROMPT = (5,) * 40


def handed_on(*seq_ids: SeqId) -> Flight:
    """Its prompt is computed, and its first token told."""
    specs = [
        SeqSpec(
            seq_id=seq_id,
            request_id="r",
            prompt_tokens=PROMPT,
            params=SamplingParams(max_tokens=20),
        )
        for seq_id in seq_ids
    ]
    flight = Flight(7, specs)
    flight.is_prefilling = True
    flight.begin(PREFILL)
    for seq_id in seq_ids:
        flight.hear(Admitted(seq_id, 0))
        flight.hear(Emit(seq_id, (9,)))
        flight.hear(Finish(seq_id, FinishReason.LENGTH, len(PROMPT), 1, 0, 0))
    assert flight.is_prefilled
    flight.leave_prefill()
    return flight


def weight_of(flight: Flight) -> float:
    return flight.as_request(None, WEIGHT).neighbour_weight


def test_what_is_held_costs_neighbours_nothing() -> None:
    flight = handed_on(SeqId(1))
    assert (weight_of(flight), flight.lender) == (0.0, PREFILL)
    flight.begin(DECODE)
    flight.lose_worker("killed", is_failure=True)  # before it had anything copied
    assert (weight_of(flight), flight.lender) == (0.0, PREFILL)


def test_a_replayed_request_costs_what_a_new_one_does() -> None:
    """Nothing is held once its worker has admitted it, so all is computed beside others."""
    flight = handed_on(SeqId(1))
    flight.begin(DECODE)
    flight.hear(Admitted(SeqId(1), 32))
    flight.lose_worker("killed", is_failure=True)
    assert flight.lender is None
    replayed = flight.as_request(None, WEIGHT)
    assert (replayed.neighbour_weight, replayed.num_tokens) == (WEIGHT, len(PROMPT) + 1)
    new = Flight(8, flight.specs)
    assert replayed.neighbour_weight == weight_of(new)


def test_of_several_choices_all_must_have_come() -> None:
    flight = handed_on(SeqId(1), SeqId(2))
    flight.begin(DECODE)
    flight.hear(Admitted(SeqId(1), 32))
    flight.lose_worker("killed", is_failure=True)
    assert (weight_of(flight), flight.lender) == (0.0, PREFILL)
