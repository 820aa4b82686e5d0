"""Workers of several kinds come and go: all that serve at one time could take over from each other,
and who is refused hears what it serves and what the others do.
"""

from contextlib import closing
from random import Random
from typing import Any

import pytest

from headrace.cluster.fleet import Cause, Slot
from headrace.cluster.wire import Dismiss
from support.seeds import FEW_AND_A_THOUSAND
from unit.cluster.test_crew import Rig, Voice, ready

# A model's digest is of all its hyperparameters and tensors, so of its number of layers too.
FIELDS = {
    "model_digest": ("12 layers", "13 layers"),
    "kv_dtype": ("bf16", "int8"),
    "block_size": (16, 32),
}


@pytest.mark.parametrize("seeds", FEW_AND_A_THOUSAND)
def test_all_that_serve_at_one_time_are_of_one_kind(seeds: range) -> None:
    num_refused = 0
    for seed in seeds:
        rng, rig = Random(seed), Rig()
        with closing(Closing(rig)):
            first = kind(rng)
            come(rig, first)
            for _ in range(rng.randrange(4, 12)):
                serving = [slot for slot in rig.fleet if slot.is_ready]
                if serving and rng.random() < 0.3:
                    rig.wait(60.0)  # silence: all are lost, and their kind is still asked for
                    continue
                fields = dict(first)
                for name in FIELDS:
                    if rng.random() < 0.3:
                        fields[name] = rng.choice(FIELDS[name])
                slot, voice = come(rig, fields)
                assert slot.is_ready is (fields == first)
                assert len({one.ready.kind for one in rig.fleet if one.ready and one.is_ready}) <= 1
                if fields != first:
                    num_refused += 1
                    check_dismissal(slot, voice, fields, first)
    assert num_refused > len(seeds)


class Closing:
    def __init__(self, rig: Rig) -> None:
        self.close = rig.crew.end


def kind(rng: Random) -> dict[str, Any]:
    return {name: rng.choice(values) for name, values in FIELDS.items()}


def come(rig: Rig, fields: dict[str, Any]) -> tuple[Slot, Voice]:
    slot, voice = rig.come()
    rig.say(slot, ready(**fields))
    return slot, voice


def check_dismissal(
    slot: Slot, voice: Voice, fields: dict[str, Any], others: dict[str, Any]
) -> None:
    (dismissal,) = [message for message in voice.sent if isinstance(message, Dismiss)]
    its, theirs = dismissal.reason.split(", the others ")
    for text, values in ((its, fields), (theirs, others)):
        assert f"arithmetic {values['model_digest']} (" in text
        assert f"KV in {values['kv_dtype']}," in text
        assert f"blocks of {values['block_size']} tokens" in text
    assert voice.is_closed
    assert slot.cause is Cause.MISFIT
