"""Messages mean what they meant, and nothing else is taken for one."""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.adapters.frames import MAX_FRAME_BYTES
from headrace.cluster.wire import (
    MAX_PART_NAMES,
    Audited,
    Canaried,
    Configure,
    Dismiss,
    Failed,
    FromWorker,
    Loading,
    Snapshot,
    Submit,
    ToWorker,
    Turn,
    Unfit,
    decode_from_worker,
    decode_to_worker,
    encode,
    snapshot_parts,
)
from headrace.core.base.errors import TransferError
from headrace.core.base.events import Finish, Preempted, Reject
from headrace.core.base.request import FinishReason, SeqSpec
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


EVIL = "\x1b]0;root\x07" + "line\n" * 1000
SEQ = SeqId(1)


def wordy(text: str) -> list[Any]:
    """Every message that says something in words of its own, with these."""
    return [
        Dismiss(text),
        Unfit(text, text),
        Failed(text),
        Loading(text, 1, 2),
        Audited(1, text),
        Canaried(1, fault=text),
        Turn(words=(Preempted(SEQ, text, 1), Reject(SEQ, 400, text, text, text))),
        Turn(words=(Finish(SEQ, FinishReason.ERROR, 1, 1, 0, 0, error=text),)),
    ]


def texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for part in value.values() for text in texts(part)]
    if isinstance(value, list):
        return [text for part in value for text in texts(part)]
    return []


@pytest.mark.parametrize("index", range(len(wordy(""))))
def test_nothing_that_a_peer_says_drives_a_terminal_or_fills_a_log(index: int) -> None:
    evil, plain = wordy(EVIL)[index], wordy("it has no room")[index]
    decode = decode_to_worker if isinstance(evil, Dismiss) else decode_from_worker
    assert decode(encode(plain)) == plain
    for text in texts(msgspec.to_builtins(decode(encode(evil)))):
        lines = text.split("\n")
        assert all(line.isprintable() and len(line) <= 500 for line in lines)
        assert len(lines) <= (33 if isinstance(evil, Unfit) else 1)
        assert "\\x1b]0;root" in text or text.isidentifier()


def test_no_message_says_more_in_words_than_is_tamed() -> None:
    tamed = {(type(message).__name__, name) for message in wordy("") for name in vars_of(message)}
    bounded = {
        ("Hello", "name"),  # by their patterns
        ("Ready", "kv_address"),
        ("Hello", "ticket"),  # that is compared, and no more
        ("Expect", "source"),  # what a front end says of requests is their matter
        ("Expect", "salt"),
        ("Expect", "adapter"),
    }
    for kind in (*get_args(ToWorker), *get_args(FromWorker)):
        for field in msgspec.structs.fields(kind):
            if field.type is str or "Annotated[str" in str(field.type):
                assert (kind.__name__, field.name) in tamed | bounded


def vars_of(message: Any) -> list[str]:
    return list(message.__struct_fields__)


def test_what_is_none_of_ours_is_told_without_its_own_words() -> None:
    with pytest.raises(TransferError) as caught:
        decode_from_worker(msgspec.msgpack.encode({"type": "RoleIs", "role": EVIL}))
    assert len(str(caught.value)) < 600
    assert str(caught.value).isprintable()
