"""Prompts as clients write them."""

import asyncio
from typing import Any

import pytest

from headrace.core.base.errors import RequestError
from headrace.models.text.template import ChatTemplate
from headrace.server.prompts import OFFLOAD_CHARS, PromptMaker, prompt_forms
from headrace.server.wire import ChatRequest, CompletionRequest, Message
from support.fake_engine import IM_END, IM_START, TEMPLATE, VOCAB_SIZE, byte_tokenizer


def maker() -> PromptMaker:
    template = ChatTemplate(TEMPLATE, bos_token="", eos_token="")
    return PromptMaker(byte_tokenizer(), template, VOCAB_SIZE)


def chat_text(*messages: Message, **fields: Any) -> str:
    request = ChatRequest(messages=list(messages), **fields)
    return asyncio.run(maker().of_chat(request)).text


def test_a_long_prompt_is_made_beside_the_loop() -> None:
    async def test() -> None:
        pending = asyncio.create_task(maker().of_completion(["x" * (OFFLOAD_CHARS + 1)]))
        await asyncio.sleep(0)
        assert not pending.done()
        (prompt,) = await pending
        assert len(prompt.tokens) == OFFLOAD_CHARS + 1

    asyncio.run(test())


def test_special_tokens_of_the_template_become_tokens() -> None:
    request = ChatRequest(messages=[Message("user", "hi")])
    tokens = asyncio.run(maker().of_chat(request)).tokens
    assert tokens.count(IM_START) == 2
    assert tokens.count(IM_END) == 1


def test_a_final_message_is_left_open() -> None:
    text = chat_text(
        Message("user", "hi"), Message("assistant", " So: "), continue_final_message=True
    )
    assert text.endswith("<|im_start|>assistant\n So: ")


def test_a_final_message_without_text_cannot_be_continued() -> None:
    with pytest.raises(RequestError) as caught:
        chat_text(Message("assistant", " "), continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_a_model_without_template_has_no_chat() -> None:
    bare = PromptMaker(byte_tokenizer(), None, VOCAB_SIZE)
    with pytest.raises(RequestError) as caught:
        asyncio.run(bare.of_chat(ChatRequest(messages=[Message("user", "x")])))
    assert caught.value.code == "no_chat_template"


def test_true_is_no_token_id() -> None:
    assert prompt_forms(CompletionRequest(prompt=[1, 2])) == [[1, 2]]
    with pytest.raises(RequestError):
        prompt_forms(CompletionRequest(prompt=["a", [1]]))
