"""The official client and every form of answer, on a model whose answers are known."""

from typing import Any

import openai
import pytest

from support.client_calls import HELLO, PROMPT, chat, complete
from support.fake_engine import (
    MODEL_NAME,
)
from support.http_server import RunningServer

# ---- models


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL_NAME]
    assert client.models.retrieve(MODEL_NAME).object == "model"


@pytest.mark.parametrize("route", ["models", "chat", "completions"])
def test_an_unknown_model_is_not_found(client: openai.OpenAI, route: str) -> None:
    calls: dict[str, Any] = {
        "models": lambda: client.models.retrieve("org/other"),
        "chat": lambda: client.chat.completions.create(model="org/other", messages=HELLO),
        "completions": lambda: client.completions.create(model="org/other", prompt="x"),
    }
    with pytest.raises(openai.NotFoundError) as caught:
        calls[route]()
    assert caught.value.code == "model_not_found"
    assert "org/other" in caught.value.message


# ---- chat


def test_a_chat_answer_is_complete(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=7)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL_NAME
    assert answer.system_fingerprint.startswith("fp_")
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert len(choice.message.content) == 7
    assert choice.logprobs is None
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7


def test_a_chat_stream_is_framed_as_openai_frames_it(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    chunks = list(chat(client, max_tokens=5, n=2, seed=3, stream=True, stream_options=options))
    whole = chat(client, max_tokens=5, n=2, seed=3)
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert mine[0].delta.content == ""
        assert [one.delta.role for one in mine[1:]] == [None] * (len(mine) - 1)
        assert [one.finish_reason for one in mine] == [None] * (len(mine) - 1) + ["length"]
        text = "".join(one.delta.content or "" for one in mine)
        assert text == whole.choices[index].message.content
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 10
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_usage_can_come_with_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(client, max_tokens=4, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] <= 1
    assert counts[-1] == 4


def test_a_chat_has_no_default_limit_but_the_context(client: openai.OpenAI) -> None:
    answer = chat(client)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 2048


def test_max_completion_tokens_goes_before_max_tokens(client: openai.OpenAI) -> None:
    assert chat(client, max_completion_tokens=3).usage.completion_tokens == 3
    assert chat(client, max_completion_tokens=3, max_tokens=9).usage.completion_tokens == 3


def test_all_roles_and_text_parts_reach_the_template(
    client: openai.OpenAI, server: RunningServer
) -> None:
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    answer = chat(client, messages, max_tokens=1, extra_body={"return_token_ids": True})
    text = server.booted.tokenizer.decode(answer.prompt_token_ids, skip_special=False)
    assert text == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nab<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def prompt_of(client: openai.OpenAI, server: RunningServer, messages: Any, **extra: Any) -> str:
    body = {"return_token_ids": True, **extra}
    answer = chat(client, messages, max_tokens=1, extra_body=body)
    text: str = server.booted.tokenizer.decode(answer.prompt_token_ids, skip_special=False)
    return text


def test_the_generation_prompt_can_be_left_out(
    client: openai.OpenAI, server: RunningServer
) -> None:
    text = prompt_of(client, server, HELLO, add_generation_prompt=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n"


def test_the_final_message_can_be_continued(client: openai.OpenAI, server: RunningServer) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Sure, "}]
    text = prompt_of(client, server, messages, continue_final_message=True)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nSure, "


def test_template_arguments_reach_the_template(
    client: openai.OpenAI, server: RunningServer
) -> None:
    text = prompt_of(client, server, HELLO, chat_template_kwargs={"shout": "LOUD"})
    assert "LOUD<|im_start|>assistant" in text


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=3, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert "".join(one.token for one in content) == answer.choices[0].message.content
    for one in content:
        assert one.bytes == list(one.token.encode())
        assert one.logprob == -1.0
        assert [top.logprob for top in one.top_logprobs] == [-0.5, -1.0]
        assert one.top_logprobs[1].token == one.token
    streamed = chat(client, max_tokens=3, logprobs=True, seed=1, stream=True)
    tokens = [
        one.token
        for chunk in streamed
        if chunk.choices and chunk.choices[0].logprobs
        for one in chunk.choices[0].logprobs.content
    ]
    again = chat(client, max_tokens=3, logprobs=True, seed=1)
    assert tokens == [one.token for one in again.choices[0].logprobs.content]


def test_chat_prompt_logprobs(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=1, extra_body={"prompt_logprobs": 1, "return_token_ids": True})
    shown, ids = answer.prompt_logprobs, answer.prompt_token_ids
    assert shown[0] is None
    assert len(shown) == len(ids)
    for entry, token_id in zip(shown[1:], ids[1:], strict=True):
        assert entry[str(token_id)]["rank"] == 2
        assert entry[str(token_id)]["logprob"] == -1.0
        assert [one["rank"] for one in entry.values()] == [1, 2]


# ---- completions


def test_a_completion_is_complete(client: openai.OpenAI) -> None:
    answer = complete(client)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.usage.completion_tokens == 16  # OpenAI's default
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert len(answer.choices[0].text) == 16


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [
        ("ab", 1),
        (["ab"], 1),
        (["ab", "cd", "ef"], 3),
        ([97, 98], 1),
        ([[97, 98], [99, 100]], 2),
    ],
)
def test_every_form_of_prompt(client: openai.OpenAI, prompt: Any, num_prompts: int) -> None:
    answer = complete(client, prompt, max_tokens=2, temperature=0)
    assert answer.usage.prompt_tokens == 2 * num_prompts
    assert answer.usage.completion_tokens == 2 * num_prompts
    assert (
        answer.choices[0].text
        == complete(client, "ab", max_tokens=2, temperature=0).choices[0].text
    )


def test_choices_of_several_prompts_are_numbered_on(client: openai.OpenAI) -> None:
    prompts = ["ab", "cd", "ef"]
    answer = complete(client, prompts, n=2, max_tokens=6, seed=5)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for index, prompt in enumerate(prompts):
        alone = complete(client, prompt, n=2, max_tokens=6, seed=5)
        mine = answer.choices[2 * index : 2 * index + 2]
        assert [one.text for one in mine] == [one.text for one in alone.choices]


def test_streamed_completions_of_several_prompts(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    fields: dict[str, Any] = {"n": 2, "max_tokens": 5, "seed": 5}
    chunks = list(complete(client, ["ab", "cd"], stream=True, stream_options=options, **fields))
    whole = complete(client, ["ab", "cd"], **fields)
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {choice.index: choice.text for choice in whole.choices}
    finished = [c.choices[0].index for c in chunks[:-1] if c.choices[0].finish_reason]
    assert sorted(finished) == [0, 1, 2, 3]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 20
    assert chunks[-1].usage.prompt_tokens == 4


def test_echo_shows_the_prompt(client: openai.OpenAI) -> None:
    answer = complete(client, echo=True, max_tokens=3)
    assert answer.choices[0].text.startswith(PROMPT)
    assert len(answer.choices[0].text) == len(PROMPT) + 3
    streamed = complete(client, echo=True, max_tokens=3, stream=True)
    assert next(iter(streamed)).choices[0].text == PROMPT


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI) -> None:
    answer = complete(client, "héllo", echo=True, logprobs=2, max_tokens=2)
    shown = answer.choices[0].logprobs
    assert shown.tokens[:4] == ["h", "bytes:\\xc3", "bytes:\\xa9", "l"]
    assert shown.token_logprobs == [None] + [-1.0] * 7
    assert shown.top_logprobs[0] is None
    assert shown.top_logprobs[3] == {"m": -0.5, "l": -1.0}
    assert shown.text_offset == [0, 1, 1, 2, 3, 4, 5, 6]
    streamed = complete(client, "héllo", echo=True, logprobs=2, max_tokens=2, stream=True)
    tokens = [t for c in streamed if c.choices[0].logprobs for t in c.choices[0].logprobs.tokens]
    assert len(tokens) == 8


def test_a_prompt_can_be_scored_without_output(client: openai.OpenAI) -> None:
    answer = complete(client, "abc", echo=True, logprobs=1, max_tokens=0)
    assert answer.choices[0].text == "abc"
    assert answer.choices[0].logprobs.tokens == ["a", "b", "c"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 0


def test_completion_logprobs_without_echo(client: openai.OpenAI) -> None:
    answer = complete(client, logprobs=1, max_tokens=3)
    shown = answer.choices[0].logprobs
    assert "".join(shown.tokens) == answer.choices[0].text
    assert shown.text_offset == [len(PROMPT) + i for i in range(3)]
    # The chosen token is shown even where it is not among the likeliest.
    assert all(token in top for token, top in zip(shown.tokens, shown.top_logprobs, strict=True))
    assert [len(top) for top in shown.top_logprobs] == [2, 2, 2]
    assert complete(client, max_tokens=1).choices[0].logprobs is None
    assert complete(client, max_tokens=1, logprobs=0).choices[0].logprobs is not None


def test_token_ids_are_returned(client: openai.OpenAI) -> None:
    answer = complete(client, max_tokens=3, extra_body={"return_token_ids": True})
    assert bytes(answer.choices[0].token_ids).decode() == answer.choices[0].text
    assert bytes(answer.choices[0].prompt_token_ids).decode() == PROMPT
    streamed = complete(client, max_tokens=3, stream=True, extra_body={"return_token_ids": True})
    chunks = [chunk.choices[0] for chunk in streamed]
    assert bytes(chunks[0].prompt_token_ids).decode() == PROMPT
    assert sum(len(getattr(c, "token_ids", None) or []) for c in chunks) == 3


def test_completion_prompt_logprobs(client: openai.OpenAI) -> None:
    answer = complete(client, "abc", max_tokens=1, extra_body={"prompt_logprobs": 0})
    first, *rest = answer.choices[0].prompt_logprobs
    assert first is None
    assert [list(entry) for entry in rest] == [["98"], ["99"]]
