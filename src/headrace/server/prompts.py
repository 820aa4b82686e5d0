"""From what a client wrote to prompt tokens: prompt forms, chat messages, template, tokeniser.

A template renders in a process of its own, which a thread waits for; tokenising takes time in
proportion to the text, so long ones run in a small thread pool. Neither holds up the loop.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from headrace.core.base.errors import InvariantError, OverloadError, RequestError
from headrace.live.bounds import check_length, check_text
from headrace.models.text.template import ChatTemplate
from headrace.models.text.tokenizer import Tokenizer
from headrace.server.errors import unsupported
from headrace.server.params import too_much
from headrace.server.wire import ChatRequest, CompletionRequest, ContentPart, Message

OFFLOAD_CHARS = (
    8192  # text beyond this is tokenised beside the loop; below, a hop costs more than it frees
)
RENDER_WAIT_S = 5.0  # for the template's turn and its rendering together
RETRY_AFTER_S = 2.0
ROLES = ("system", "user", "assistant", "tool", "developer")

MAX_TEMPLATE_KWARGS = 16
MAX_TEMPLATE_TEXT = 4096
_RESERVED_KWARGS = frozenset(
    {"messages", "add_generation_prompt", "tools", "bos_token", "eos_token", "documents"}
)
_KWARG_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: tuple[int, ...]
    text: str


class PromptMaker:
    """Makes prompts with one tokeniser and one template. Thread-safe as far as these are."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        vocab_size: int,
        max_model_len: int,
        special_tokens_in_content: bool = False,
    ) -> None:
        """`special_tokens_in_content`: what a message spells becomes special tokens too, not only
        what the template does.
        """
        self._tokenizer = tokenizer
        self._template = template
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._special_tokens_in_content = special_tokens_in_content
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="headrace-prompts")
        # One, because a template renders one at a time; its own, because a template may be slow.
        self._rendering = ThreadPoolExecutor(1, thread_name_prefix="headrace-template")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._rendering.shutdown(wait=False, cancel_futures=True)

    async def of_completion(self, given: list[str | list[int]]) -> list[Prompt]:
        size = sum(map(len, given))

        def prompts() -> list[Prompt]:
            for one in given:  # all of them before the first one takes its time
                self._check_size(one)
            return [self._prompt(one) for one in given]

        return await self._run(size, prompts)

    async def of_chat(self, request: ChatRequest) -> Prompt:
        if self._template is None:
            raise RequestError(
                "the model has no chat template",
                code="no_chat_template",
                hint="use /v1/completions, or give the server one with `model.chat_template`",
            )
        messages = [_message(index, one) for index, one in enumerate(request.messages)]
        arguments = _template_kwargs(request.chat_template_kwargs or {})
        literal, given = self._tokenizer.literal, [messages, arguments]
        size = sum(len(message["content"]) for message in messages)
        is_hidden = not self._special_tokens_in_content and await self._run(
            size, lambda: literal.is_needed(given)
        )
        if is_hidden:
            messages, arguments = await self._run(size, lambda: literal.hide(given))
        text = await self._rendered(request, messages, arguments)

        def prompt() -> Prompt:
            final = messages[-1]["content"]
            kept = _up_to_final_message(text, final) if request.continue_final_message else text
            shown = literal.show(kept) if is_hidden else kept
            self._check_size(shown)
            if is_hidden:
                return Prompt(tuple(literal.encode(kept)), shown)
            # The template writes the special tokens itself.
            return Prompt(tuple(self._tokenizer.encode(kept, add_special=False)), kept)

        # What is hidden may need a tokenizer that is yet to be made.
        return await self._run(OFFLOAD_CHARS + 1 if is_hidden else len(text), prompt)

    async def _run(self, num_chars: int, make: Callable[[], Result]) -> Result:
        if num_chars <= OFFLOAD_CHARS:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._pool, make)

    def _check_size(self, given: str | list[int]) -> None:
        if isinstance(given, str):
            check_text(self._tokenizer, given, self._max_model_len)
        else:
            check_length(given, self._max_model_len)

    def _prompt(self, given: str | list[int]) -> Prompt:
        if isinstance(given, str):
            return Prompt(tuple(self._tokenizer.encode(given)), given)
        for token_id in given:
            if not 0 <= token_id < self._vocab_size:
                raise too_much(
                    "prompt", token_id, self._vocab_size - 1, what="has an unknown token id"
                )
        return Prompt(tuple(given), self._tokenizer.decode(given))

    async def _rendered(
        self, request: ChatRequest, messages: list[dict[str, Any]], arguments: dict[str, Any]
    ) -> str:
        if self._template is None:
            raise InvariantError("a chat without a template was let through")
        generation = request.add_generation_prompt
        render = partial(
            self._template.render,
            messages,
            add_generation_prompt=(
                not request.continue_final_message if generation is None else generation
            ),
            tools=None,
            **arguments,
        )
        try:
            # Whoever gives up before its turn, or whose client leaves, gives its place free.
            async with asyncio.timeout(RENDER_WAIT_S):
                return await asyncio.get_running_loop().run_in_executor(self._rendering, render)
        except TimeoutError:
            raise OverloadError(
                f"the chat template had no time for this request within {RENDER_WAIT_S:g} s",
                retry_after_s=RETRY_AFTER_S,
            ) from None


def prompt_forms(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a completion request: text, several texts, token ids, or several lists of
    token ids.
    """
    match request.prompt:
        case str(text):
            return [text]
        case []:
            raise RequestError("`prompt` is an empty list", code="invalid_value", param="prompt")
        case [*entries] if all(isinstance(one, int) for one in entries):
            return [[one for one in entries if isinstance(one, int)]]
        case [*entries] if all(isinstance(one, str) for one in entries):
            return [one for one in entries if isinstance(one, str)]
        case [*entries] if all(isinstance(one, list) for one in entries):
            return [one for one in entries if isinstance(one, list)]
        case _:
            raise RequestError(
                "`prompt` mixes texts and token ids", code="invalid_value", param="prompt"
            )


def check_messages(messages: list[Message]) -> None:
    if not messages:
        raise RequestError("`messages` is empty", code="invalid_value", param="messages")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise RequestError(
                f"unknown role, one of {', '.join(ROLES)} is expected",
                code="invalid_value",
                param=f"messages[{index}].role",
                got=message.role[:32],
            )


def _message(index: int, message: Message) -> dict[str, Any]:
    """A message as templates expect it: content is one text, and only fields that are there."""
    # Templates know the older name of the same role.
    role = "system" if message.role == "developer" else message.role
    rendered: dict[str, Any] = {"role": role, "content": _content(index, message)}
    for name in ("name", "tool_calls", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            rendered[name] = value
    return rendered


def _content(index: int, message: Message) -> str:
    match message.content:
        case str(text):
            return text
        case None if message.role == "assistant" and message.tool_calls:
            return ""
        case None:
            raise RequestError(
                "the message has no content",
                code="invalid_value",
                param=f"messages[{index}].content",
            )
        case parts:
            return "".join(_part(f"messages[{index}].content[{i}]", p) for i, p in enumerate(parts))


def _part(param: str, part: ContentPart) -> str:
    if part.type != "text":
        raise unsupported(param, f'content of type "{part.type[:32]}"')
    if part.text is None:
        raise RequestError("the text part has no text", code="invalid_value", param=param)
    return part.text


def _template_kwargs(given: Mapping[str, Any]) -> dict[str, Any]:
    if len(given) > MAX_TEMPLATE_KWARGS:
        raise too_much(
            "chat_template_kwargs", len(given), MAX_TEMPLATE_KWARGS, what="has too many entries"
        )
    for name, value in given.items():
        is_scalar = value is None or isinstance(value, bool | int | float | str)
        if name in _RESERVED_KWARGS or not _KWARG_NAME.fullmatch(name) or not is_scalar:
            raise RequestError(
                "`chat_template_kwargs` takes plain names with text, numbers or truth values",
                code="invalid_value",
                param="chat_template_kwargs",
                name=name[:64],
            )
        if isinstance(value, str) and len(value) > MAX_TEMPLATE_TEXT:
            raise too_much(
                "chat_template_kwargs", len(value), MAX_TEMPLATE_TEXT, what="is too long"
            )
    return dict(given)


def _up_to_final_message(text: str, content: str) -> str:
    """Cut what the template writes after the final message, so that the model goes on within it."""
    # Templates often strip a message, so its stripped form is what can be found.
    wanted = content.strip()
    start = text.rfind(wanted)
    if not wanted or start < 0:
        raise RequestError(
            "the final message cannot be continued: the template does not show its text as it is",
            code="invalid_value",
            param="continue_final_message",
        )
    end = start + len(wanted)
    trailing = content[len(content.rstrip()) :]
    return text[:end] + (trailing if text.startswith(trailing, end) else "")
