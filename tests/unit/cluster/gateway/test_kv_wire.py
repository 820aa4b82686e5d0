"""Batches of KV events, in the forms that engines publish them in."""

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.gateway.kv_wire import (
    MAX_BATCH_BYTES,
    MAX_EVENTS,
    ClearedEvent,
    RemovedEvent,
    StoredEvent,
    Unreadable,
    read_batch,
)
from support.kv_publisher import CLEARED, batch, batch_of_arrays, removed, stored

TOKENS = list(range(32))
pack = msgspec.msgpack.encode


@pytest.mark.parametrize("written", [batch, batch_of_arrays])
def test_both_spellings_mean_the_same(written: Any) -> None:
    one, two, three = read_batch(
        written(stored([7, b"\x01\x02"], TOKENS, parent=5), removed(7), CLEARED)
    )
    assert isinstance(one, StoredEvent)
    assert (one.block_hashes, one.parent_block_hash, one.block_size) == ([7, b"\x01\x02"], 5, 16)
    assert (one.token_ids, one.medium, one.lora_name) == (TOKENS, "GPU", None)
    assert isinstance(two, RemovedEvent)
    assert two.block_hashes == [7]
    assert isinstance(three, ClearedEvent)


def test_fields_that_are_missing_at_the_end_or_not_known() -> None:
    # As SGLang writes them; and as some later version might.
    short = ["BlockStored", [7], None, TOKENS, 32, None]
    (event,) = read_batch(pack([1.5, [short]]))
    assert isinstance(event, StoredEvent)
    assert event.medium is None
    (event,) = read_batch(batch(stored([7], TOKENS, colour="red")))
    assert isinstance(event, StoredEvent)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockMoved", "block_hashes": [1]},
        {"type": "BlockStored"},
        stored([1, 2], TOKENS[:31]),
        stored([1], TOKENS) | {"block_size": -32},
        stored([1], TOKENS) | {"token_ids": "many"},
        ["BlockRemoved"],
        7,
    ],
)
def test_an_event_that_makes_no_sense_is_none_and_the_others_count(event: Any) -> None:
    first, last = read_batch(batch(event, removed(3)))
    assert first is None
    assert isinstance(last, RemovedEvent)


@pytest.mark.parametrize(
    "payload", [b"", b"{}", pack(7), pack([]), pack({"ts": 1.0}), b"\x91" * 9999]
)
def test_what_is_no_batch(payload: bytes) -> None:
    with pytest.raises(Unreadable):
        read_batch(payload)


def test_a_batch_of_more_events_than_any_step_has_is_none() -> None:
    """Millions of them fit into what a message may have, and would be read for minutes."""
    assert len(read_batch(batch_of_nothing(MAX_EVENTS))) == MAX_EVENTS
    with pytest.raises(Unreadable, match=r"length <= 65536"):
        read_batch(batch_of_nothing(MAX_EVENTS + 1))
    with pytest.raises(Unreadable, match="8388609 bytes, 8388608 is the limit"):
        read_batch(bytes(MAX_BATCH_BYTES + 1))


def batch_of_nothing(num_events: int) -> bytes:
    return pack([1.0, [None] * num_events])


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(payload: bytes) -> None:
    with suppress(Unreadable):
        read_batch(payload)
