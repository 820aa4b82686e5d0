"""What a recording's lines say, and what they keep to themselves."""

import json
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from headrace.core.base.errors import ConfigError
from headrace.core.base.request import SeqSpec, Slo
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import Ns, SeqId
from headrace.core.config.schema import RouterConfig
from headrace.core.workload.recording import (
    NAME_BYTES,
    Begin,
    Line,
    Lost,
    Namer,
    Recorded,
    encode_line,
    read_recording,
    recorded,
)
from support.recordings import pool
from support.records import record_of

KEY, OTHER_KEY = bytes(32), bytes([1]) * 32
BEGIN = Begin(block_tokens=16, recording_id="a")


def request(number: int, **fields: object) -> Recorded:
    known: dict[str, object] = {"arrived_ns": number, "prompt_tokens": 8, "output_tokens": 1}
    known |= {"max_tokens": 1, "end": "length"}
    return Recorded(request=number, **{**known, **fields})  # type: ignore[arg-type]


def lines_of(lines: Iterable[Line]) -> list[bytes]:
    return [encode_line(line) + b"\n" for line in lines]


def spec(prompt: tuple[int, ...], **fields: object) -> SeqSpec:
    known = {"seq_id": SeqId(0), "request_id": "secret-id", "params": SamplingParams(max_tokens=9)}
    return SeqSpec(prompt_tokens=prompt, **{**known, **fields})  # type: ignore[arg-type]


def test_equal_prefixes_have_equal_names_under_one_key_only() -> None:
    namer, text = Namer(KEY, 16), tuple(range(100, 150))
    one, longer = namer.chain("", text), namer.chain("", (*text, *range(20)))
    assert len(one) == 3 * NAME_BYTES
    assert longer.startswith(one)
    assert namer.chain("tenant", text)[:NAME_BYTES] != one[:NAME_BYTES]
    other = Namer(OTHER_KEY, 16).chain("", text)
    names = {one[i : i + NAME_BYTES] for i in range(0, len(one), NAME_BYTES)}
    assert not names & {other[i : i + NAME_BYTES] for i in range(0, len(other), NAME_BYTES)}
    changed = namer.chain("", (*text[:20], 0, *text[21:]))
    assert changed[:NAME_BYTES] == one[:NAME_BYTES]
    assert not names & {changed[i : i + NAME_BYTES] for i in (8, 16)}


def test_the_end_of_a_prompt_has_a_name_that_its_answer_does_not_change() -> None:
    namer = Namer(KEY, 4)
    lines = [
        recorded(spec((1, 2, 3, 4, 5)), output, None, namer=namer, number=0, began_ns=Ns(0))
        for output in ((6, 7, 8), (9, 9, 9))
    ]
    assert lines[0].tail == lines[1].tail != b""
    assert lines[0].blocks[:NAME_BYTES] == lines[1].blocks[:NAME_BYTES]
    assert lines[0].blocks != lines[1].blocks
    whole = recorded(spec((1, 2, 3, 4)), (), None, namer=namer, number=0, began_ns=Ns(0))
    assert whole.tail == b""


def test_a_line_holds_what_became_of_a_sequence() -> None:
    namer = Namer(KEY, 16)
    record = record_of(
        SeqId(0), num_output_tokens=5, ttft_ns=Ns(7), e2e_ns=Ns(90), num_cached_tokens=16
    )
    line = recorded(
        spec((3,) * 20, arrived_ns=Ns(70), priority=2, slo=Slo(ttft_ms=5.0)),
        (1,) * 5,
        record,
        namer=namer,
        number=4,
        began_ns=Ns(50),
    )
    assert (line.request, line.arrived_ns, line.prompt_tokens) == (4, 20, 20)
    assert (line.output_tokens, line.max_tokens, line.cached_tokens) == (5, 9, 16)
    assert (line.priority, line.slo, line.end) == (2, Slo(ttft_ms=5.0), "stop")
    assert (line.ttft_ns, line.e2e_ns) == (7, 90)
    assert len(line.causes) == 4
    read = read_recording(lines_of([BEGIN, line]))
    assert read.requests == (line,)
    refused = recorded(
        spec((3,) * 20), (), None, namer=namer, number=0, began_ns=Ns(0), code="queue_full"
    )
    assert (refused.end, refused.code, refused.ttft_ns) == ("rejected", "queue_full", None)
    assert b"secret-id" not in encode_line(line)


def test_a_recording_is_read_in_the_order_of_arrival() -> None:
    read = read_recording(lines_of([BEGIN, request(5), request(2), Lost(num_requests=3)]))
    assert [line.request for line in read.requests] == [2, 5]
    assert (read.num_lost, read.is_truncated) == (3, False)


@pytest.mark.parametrize("num_cut", [1, 2, 30])
def test_a_last_line_that_is_cut_is_left_out(num_cut: int) -> None:
    lines = lines_of([BEGIN, request(0), request(1)])
    lines[-1] = lines[-1][: -1 - num_cut]
    read = read_recording(lines)
    assert [line.request for line in read.requests] == [0]
    assert read.is_truncated


def test_a_last_line_without_its_end_is_whole() -> None:
    lines = lines_of([BEGIN, request(0)])
    lines[-1] = lines[-1].rstrip()
    assert len(read_recording(lines).requests) == 1


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "empty"),
        ([b'{"kind":"begin","format":"hrtraffic9","block_tokens":16}\n'], "hrtraffic1"),
        ([b"PK\x03\x04"], "line 1"),
        (lines_of([request(0)]), "not a recording"),
        ([*lines_of([BEGIN]), b'{"kind":"requ\n', *lines_of([request(0)])], "line 2"),
        ([b'{"kind":' * 100_000], "line 1 of the recording is damaged: too deep"),
        ([b'{"kind":"begin","block_tokens":0}\n'], "block_tokens is 0"),
        (lines_of([BEGIN, request(0, prompt_tokens=0)]), "line 2 .*prompt_tokens is 0"),
        (lines_of([BEGIN, request(0, output_tokens=10**18)]), r"output_tokens is 1e\+18"),
        (lines_of([BEGIN, request(0, max_tokens=-1)]), "max_tokens is -1"),
        (lines_of([BEGIN, request(0, arrived_ns=10**30)]), r"arrived_ns is 1e\+30"),
        (lines_of([BEGIN, request(0, ttft_ns=-1)]), "ttft_ns is -1"),
        (lines_of([BEGIN, request(0, e2e_ns=10**30)]), r"e2e_ns is 1e\+30"),
        (lines_of([BEGIN, request(0, cached_tokens=-7)]), "cached_tokens is -7"),
        (lines_of([BEGIN, Lost(num_requests=-1)]), "num_requests is -1"),
        (lines_of([msgspec.structs.replace(BEGIN, handoff="no")]), "handoff is 'no'"),
        (
            lines_of([msgspec.structs.replace(BEGIN, router=RouterConfig(policy="no"))]),
            "policy is 'no'",
        ),
        (lines_of([BEGIN, request(0, end="exploded")]), "nothing ends by 'exploded'"),
        (lines_of([BEGIN, request(0, blocks=b"abc")]), "8 bytes"),
    ],
)
def test_what_is_no_recording_is_refused(lines: list[bytes], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_recording(lines)


def test_fields_that_say_nothing_take_no_room() -> None:
    assert set(json.loads(encode_line(request(1)))) == {
        *("kind", "request", "arrived_ns", "prompt_tokens", "output_tokens", "max_tokens", "end")
    }
    assert msgspec.json.decode(encode_line(BEGIN))["recording_id"] == "a"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_workers": 10**9}, "num_workers is 1000000000"),
        ({"spec": {"num_blocks": 0}}, "num_blocks is 0"),
        ({"spec": {"num_blocks": 10**12}}, r"num_blocks is 1e\+12"),
        ({"spec": {"block_size": 0}}, "block_size is 0"),
        ({"config": {"scheduler": {"step_tokens": 0}}}, "step_tokens is 0"),
        ({"config": {"scheduler": {"max_running_seqs": 0}}}, "max_running_seqs is 0"),
        ({"cost": {"knot_ns": [1e300] * 11}}, r"ns of a step is 1e\+300"),
        ({"cost": {"kv_token_ns": 1e300}}, r"ns of a step is 1e\+300"),
    ],
)
def test_workers_that_cannot_be_are_refused(changed: dict[str, Any], words: str) -> None:
    """Each would have the simulation fail, go on for ever, or out of memory."""
    facts = with_changes(msgspec.to_builtins(pool()), changed)
    line = msgspec.json.encode({"kind": "pools", "at_ns": 0, "pools": [facts]}) + b"\n"
    with pytest.raises(ConfigError, match=f"line 2 of the recording is damaged: {words}"):
        read_recording([*lines_of([BEGIN]), line])


def with_changes(facts: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """The same with other leaves."""
    return facts | {
        name: with_changes(facts[name], value) if isinstance(value, dict) else value
        for name, value in changed.items()
    }
