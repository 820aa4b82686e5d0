"""Chunks of streams: what is encoded once has the bytes of what is encoded each time."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from headrace.core.base.request import FinishReason
from headrace.live.choice import ChoiceDelta, ChoiceFinish
from headrace.server import sse
from headrace.server.answer import Answer
from headrace.server.chat import ChatStream
from headrace.server.completions import CompletionStream
from headrace.server.generation import Tally, Writer

TEXTS = ["a", "", '"', "\\", "\0", "\n\u2028", "é", "\U0001f600", "</script>", "x" * 300]


def answer_of(**fields: Any) -> Answer:
    served = SimpleNamespace(name='a "model"', fingerprint="fp_1", tokens=None)
    asked = {
        "id": "cmpl-1",
        "created_s": 7,
        "served": cast(Any, served),
        "prompts": (SimpleNamespace(text="p", tokens=(1,)),),
        "tally": Tally(),
        "num_choices": 2,
        "show_logprobs": False,
        "show_prompt_logprobs": False,
        "show_token_ids": False,
        "skip_special": True,
        "include_usage": False,
        "continuous_usage": False,
    }
    return Answer(**(asked | fields))


def events_of(writer: Writer, deltas: list[ChoiceDelta]) -> list[bytes]:
    return [writer.add(0, delta) for delta in deltas]


def deltas_of(texts: list[str]) -> list[ChoiceDelta]:
    ended = ChoiceFinish(
        reason=FinishReason.LENGTH,
        stop_reason=None,
        num_prompt_tokens=1,
        num_output_tokens=len(texts),
        num_cached_tokens=0,
    )
    shown = [
        ChoiceDelta(index=index, text=text, token_ids=(1,)) for text in texts for index in (0, 1)
    ]
    return [*shown, ChoiceDelta(index=0, text="end", finish=ended)]


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
def test_an_event_has_the_bytes_of_its_chunk(
    is_chat: bool, include_usage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = answer_of(include_usage=include_usage)
    make = ChatStream if is_chat else CompletionStream
    deltas = deltas_of(TEXTS)
    events = events_of(make(answer), deltas)
    monkeypatch.setattr(Answer, "is_text_only", False)
    assert events == events_of(make(answer), deltas)
    told = [msgspec.json.decode(event[6:-2])["choices"][0] for event in events[2:-1]]
    texts = [one["delta"]["content"] if is_chat else one["text"] for one in told]
    assert texts == [text for text in TEXTS[1:] for _ in range(2)]


def test_what_differs_in_more_than_its_text_is_no_text_event() -> None:
    assert answer_of().is_text_only
    assert not answer_of(show_token_ids=True).is_text_only
    assert not answer_of(show_logprobs=True).is_text_only
    assert not answer_of(include_usage=True, continuous_usage=True).is_text_only


def test_a_text_that_is_a_mark_is_a_text() -> None:
    class Said(msgspec.Struct):
        before: str
        text: str

    event = sse.TextEvent(Said('"', sse.TextEvent.TEXT))
    for text in TEXTS:
        assert event.of(text) == sse.event(Said('"', text))
