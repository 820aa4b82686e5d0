"""Messages mean what they meant, and nothing else is taken for one."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.adapters.frames import MAX_FRAME_BYTES
from headrace.cluster.wire import (
    MAX_PART_NAMES,
    Configure,
    Loading,
    Snapshot,
    Submit,
    decode_from_worker,
    decode_to_worker,
    encode,
    snapshot_parts,
)
from headrace.core.base.errors import TransferError
from headrace.core.base.request import SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import Ns, SeqId
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import Config
from headrace.core.kv.names import NAME_BYTES


def test_a_configuration_and_a_request_survive_the_way() -> None:
    for message in (
        Configure(config=Config(cluster=ClusterConfig(workers=3)), num_sharing=3),
        Submit(
            (
                SeqSpec(
                    seq_id=SeqId(7),
                    request_id="é",
                    prompt_tokens=(1, 2),
                    output_tokens=(3,),
                    params=SamplingParams(logit_bias=((5, -1.5),)),
                ),
            ),
            Ns(5),
        ),
    ):
        assert decode_to_worker(encode(message)) == message
    assert decode_from_worker(encode(Snapshot(3, (b"\0\xff",)))) == Snapshot(3, (b"\0\xff",))


@pytest.mark.parametrize("num_names", [0, 1, 3, 4, 7, 9])
def test_a_snapshot_has_all_names_in_parts_that_a_frame_holds(
    num_names: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.cluster.wire.MAX_PART_NAMES", 3)
    names = {bytes([number]): None for number in range(num_names)}
    parts = list(snapshot_parts(5, names))
    assert [name for part in parts for name in part.names] == list(names)
    assert max(len(part.names) for part in parts) <= 3
    assert {part.kv_no for part in parts} == {5}
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]


def test_the_largest_part_of_a_snapshot_fits_into_a_frame() -> None:
    part = Snapshot(1 << 60, (bytes(NAME_BYTES),) * MAX_PART_NAMES, is_last=False)
    assert len(encode(part)) < MAX_FRAME_BYTES // 8


@given(st.binary(max_size=200))
def test_bytes_are_no_message(data: bytes) -> None:
    for decode in (decode_to_worker, decode_from_worker):
        with pytest.raises(TransferError):
            decode(data)


def test_one_side_does_not_speak_as_the_other() -> None:
    with pytest.raises(TransferError):
        decode_to_worker(encode(Loading("load", 1, 2)))
    with pytest.raises(TransferError, match="none of ours"):
        decode_from_worker(msgspec.msgpack.encode({"type": "Turn", "words": "many"}))
