"""Lines of a published trace become requests, and what is none is told by its number."""

from pathlib import Path

import msgspec
import pytest

from headrace.core.base.errors import ConfigError
from headrace.core.workload.traces import (
    TraceRequest,
    kind_of,
    parse_mooncake,
    parse_trace,
    spread,
)

LINE = '{"timestamp": 1500, "input_length": 700, "output_length": 5, "hash_ids": [0, 7]}'


def test_a_line() -> None:
    (found,) = parse_mooncake([LINE, "", "  \n"])
    assert found == TraceRequest(
        arrival_s=1.5, prompt_tokens=700, output_tokens=5, blocks=(0, 7), block_tokens=512
    )


@pytest.mark.parametrize("line", ["{", "[]", LINE.replace("700", "0"), LINE.replace("0, 7", '"a"')])
def test_what_is_no_request(line: str) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        list(parse_mooncake([LINE, line]))


TRACES = Path(__file__).parents[3] / "support" / "traces"
BURST = [
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "5,ChatGPT,472,18,490,Conversation log",
    "45,ChatGPT,1087,0,1087,Conversation log",
    "118,GPT-4,417,276,693,Conversation log",
]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BAILIAN = (
    '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 40, '
    '"output_length": 7, "type": "text", "turn": 1, "hash_ids": [3, 4, 9]}'
)


def head(name: str) -> list[str]:
    return (TRACES / name).read_text().splitlines()


def test_kinds_are_told_by_their_first_line() -> None:
    assert kind_of(head("mooncake_head.jsonl")[0]) == "mooncake"
    assert kind_of(head("azure_head.csv")[0]) == "azure"
    assert kind_of(BURST[0]) == "burstgpt"
    assert kind_of(BAILIAN) == "bailian"
    with pytest.raises(ConfigError, match="no known kind"):
        kind_of("a,b,c")


def test_azure_counts_from_its_first_request() -> None:
    found = parse_trace(head("azure_head.csv"))
    assert len(found) == 60
    assert (found[0].arrival_s, found[0].prompt_tokens, found[0].output_tokens) == (0.0, 374, 44)
    assert found[1].arrival_s == pytest.approx(4.314579)  # 18:15:46.68059 to 18:15:50.995169
    assert not any(request.blocks for request in found)


@pytest.mark.parametrize(
    ("text", "days"),
    [("1970-01-01", 0), ("2000-02-29", 11_016), ("2023-11-16", 19_677), ("2024-03-01", 19_783)],
)
def test_days_are_those_of_the_calendar(text: str, days: int) -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", "1970-01-01T00:00:00Z,1,1"]
    found = parse_trace([*lines, f"{text} 00:00:01.5+00:00,1,1"])
    assert found[-1].arrival_s == days * 86_400 + 1.5


def test_burstgpt_leaves_out_what_failed() -> None:
    found = parse_trace(BURST)
    assert [(one.arrival_s, one.prompt_tokens, one.output_tokens) for one in found] == [
        (5.0, 472, 18),
        (118.0, 417, 276),
    ]


def test_bailian_has_small_blocks() -> None:
    (found,) = parse_trace([BAILIAN])
    assert (found.blocks, found.block_tokens, found.arrival_s) == ((3, 4, 9), 16, 0.5)


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        ([], "no known kind"),
        (BURST[:1], "no requests"),
        ([BURST[0], "5,ChatGPT,x,18,490,log"], "line 2 .*'x'"),
        ([BURST[0], "5,ChatGPT"], "line 2 .* 2 cells"),
        ([LINE, BURST[1]], "line 2"),
        ([BURST[0], "nan,ChatGPT,1,1,2,log"], "line 2 .* time nan"),
        ([BURST[0], "inf,ChatGPT,1,1,2,log"], "line 2 .* time beyond"),
        ([BURST[0], "-1,ChatGPT,1,1,2,log"], "line 2 .* time -1"),
        ([BURST[0], "1,ChatGPT,1,-1,0,log"], "line 2 .* output tokens -1"),
        ([BURST[0], f"1,ChatGPT,{10**12},1,2,log"], "line 2 .* prompt tokens 1"),
        ([BURST[0], f"1,ChatGPT,1,{'9' * 400},2,log"], "line 2 .* output tokens beyond"),
        ([AZURE, "2023-11-16 18:15:nan,1,1"], "line 2 .* time nan"),
        ([LINE.replace("1500", "-1500")], "line 1 .* time -1.5"),
        ([LINE.replace("1500", "1e300")], "line 1 .* time 1e.297"),
        ([LINE.replace("[0, 7]", "[" * 9999)], "line 1"),
    ],
)
def test_what_is_no_trace(lines: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parse_trace(lines)


def test_names_that_are_hashes_become_numbers() -> None:
    names = [-7, 1 << 70, 3]
    lines = [LINE.replace("0, 7", f"{one}, {names[0]}") for one in names[1:]]
    assert [one.blocks for one in parse_trace(lines)] == [(0, 1), (2, 1)]
    assert parse_trace([LINE])[0].blocks == (0, 7)


def test_a_kind_that_is_said_is_believed() -> None:
    with pytest.raises(ConfigError, match="no column 'TIMESTAMP'"):
        parse_trace(BURST, "azure")
    with pytest.raises(ConfigError, match="unknown kind"):
        parse_trace(BURST, "sharegpt")


def test_rounded_times_are_spread_by_the_seed() -> None:
    found = parse_trace(head("mooncake_head.jsonl"))
    assert len({request.arrival_s for request in found}) < 10
    moved = spread(found, seed=3)
    times = [request.arrival_s for request in moved]
    assert len(set(times)) == len(found)
    assert times == sorted(times)
    by_blocks = {request.blocks: request.arrival_s for request in found}
    assert all(0.0 <= one.arrival_s - by_blocks[one.blocks] < 3.1 for one in moved)
    assert spread(found, seed=3) == moved != spread(found, seed=4)


def test_times_are_as_rounded_at_any_speed() -> None:
    found = parse_trace(head("mooncake_head.jsonl"))
    for speed in (0.1, 10.0):
        faster = [msgspec.structs.replace(one, arrival_s=one.arrival_s / speed) for one in found]
        moved = [one.arrival_s * speed for one in spread(faster, seed=3, speed=speed)]
        assert moved == pytest.approx([one.arrival_s for one in spread(found, seed=3)])
    fine = parse_trace(head("azure_head.csv"))
    slower = [msgspec.structs.replace(one, arrival_s=one.arrival_s * 100) for one in fine]
    assert spread(slower, seed=3, speed=0.01) == slower


def test_fine_times_stay() -> None:
    found = parse_trace(head("azure_head.csv"))
    assert spread(found, seed=3) == found
