"""What the router is told of a body, whatever stands in it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.gateway.ask import BLOCK_BYTES, MAX_BLOCKS, Ask, read_ask
from headrace.core.base.errors import RequestError

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
LONG = "word " * 200


def ask(path: str = COMPLETION, session: str = "", **fields: Any) -> Ask:
    return read_ask(path, json.dumps(fields).encode(), {"x-session-id": session})


def message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def is_prefix(short: Ask, long: Ask) -> bool:
    size = len(short.block_names)
    return 0 < size < len(long.block_names) and long.block_names[:size] == short.block_names


def test_fields_that_routing_depends_on() -> None:
    found = ask(model="m", prompt=LONG, n=3, max_tokens=7, priority=-2, user="somebody")
    assert (found.model, found.num_choices) == ("m", 3)
    assert (found.max_tokens, found.priority, found.session) == (7, -2, "somebody")
    assert found.num_tokens == 1 + len(LONG) // 4
    assert len(found.block_names) == len(LONG) // BLOCK_BYTES


def test_a_header_names_the_session_before_the_body_does() -> None:
    fields = {"prompt": "x", "user": "u", "prompt_cache_key": "k"}
    assert ask(session="h", **fields).session == "h"
    assert ask(**fields).session == "k"


def test_a_longer_conversation_has_the_names_of_a_shorter_one() -> None:
    short = [message("system", LONG), message("user", LONG)]
    long = [*short, message("assistant", LONG), message("user", "and now?")]
    assert is_prefix(ask(CHAT, messages=short), ask(CHAT, messages=long))
    assert is_prefix(ask(prompt=LONG), ask(prompt=LONG * 2))
    assert is_prefix(ask("/v1/responses", input=short), ask("/v1/responses", input=long))


def test_the_spelling_of_a_message_does_not_matter() -> None:
    one = read_ask(CHAT, json.dumps({"messages": [message("user", LONG + "é")]}).encode())
    spelled = f'{{"messages":[{{"content":"{LONG}é","name":null,"role":"user"}}]}}'
    assert read_ask(CHAT, spelled.encode()).block_names == one.block_names


@pytest.mark.parametrize(
    "other",
    [
        {"model": "other"},
        {"cache_salt": "s"},
        {"tools": [{"type": "function"}]},
        {"messages": [message("system", LONG)]},
    ],
)
def test_what_changes_all_of_a_prompt_changes_all_names(other: dict[str, Any]) -> None:
    same: dict[str, Any] = {"messages": [message("user", LONG)]}
    names = set(ask(CHAT, **same).block_names)
    assert names
    assert not names & set(ask(CHAT, **{**same, **other}).block_names)


def test_pictures_count_by_their_digest() -> None:
    def with_picture(data: str) -> Ask:
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        content = [{"type": "text", "text": LONG}, picture, {"type": "text", "text": LONG}]
        return ask(CHAT, messages=[message("user", content)])

    one, other = with_picture("A" * 100_000), with_picture("B" * 100_000)
    assert one.num_tokens < 1000
    assert one.block_names[0] == other.block_names[0]
    assert one.block_names[-1] != other.block_names[-1]


def test_tokens_and_several_prompts() -> None:
    tokens = ask(prompt=list(range(200)))
    assert (tokens.num_tokens, len(tokens.block_names)) == (201, 200 * 4 // BLOCK_BYTES)
    several = ask(prompt=[LONG, "b", [1, 2]], n=2)
    assert several.num_choices == 6
    assert several.block_names == ask(prompt=LONG).block_names


def test_names_are_bounded() -> None:
    assert len(ask(prompt="x" * (BLOCK_BYTES * MAX_BLOCKS * 2)).block_names) == MAX_BLOCKS


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
FIELDS = ["model", "messages", "prompt", "input", "n", "max_tokens", "user", "priority"]


@given(st.dictionaries(st.sampled_from(FIELDS), ANY_JSON))
def test_any_object_can_be_asked(fields: dict[str, Any]) -> None:
    try:
        found = ask(CHAT, **fields)
    except RequestError:
        # Python writes NaN and infinities, which JSON does not have.
        assert any(word in json.dumps(fields) for word in ("NaN", "Infinity"))
        return
    assert found.num_tokens >= 1
    assert 1 <= found.num_choices <= 1024
    assert 0 <= found.max_tokens <= 1 << 20


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b"\xff{}", b"[" * 100_000])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        read_ask(CHAT, body)
    assert caught.value.code == "invalid_json"


def test_text_that_is_no_unicode_counts_as_absent() -> None:
    body = b'{"model": "m", "prompt": "\xff", "input": "%b"}' % LONG.encode()
    assert read_ask(COMPLETION, body) == ask(model="m", input=LONG)
