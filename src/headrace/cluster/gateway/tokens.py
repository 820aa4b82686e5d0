"""Names of prompts by their tokens, as engines that publish KV events name what they have cached.

Decides how a prompt is made of a body: as the engine does it, with the same tokenizer and template.
Where that cannot be done (pictures, other routes, a template that fails), the names by text stay.
Nothing of this changes what the engine is asked; a wrong guess costs a hit.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from headrace.cluster.gateway.ask import MAX_BLOCKS, Ask
from headrace.cluster.gateway.kv_blocks import prompt_names, prompt_root
from headrace.core.base.errors import HeadraceError
from headrace.models.load import LoadedText, load_text_of_any

MAX_CHARS: Final = 1 << 20  # of a text that is tokenised here
OFFLOAD_CHARS: Final = 8192  # from which on it is tokenised beside the loop
RENDER_WAIT_S: Final = 1.0  # for the template's turn and its rendering together

_CHAT: Final = "/v1/chat/completions"
_COMPLETIONS: Final = "/v1/completions"
_Value = TypeVar("_Value")


class _Body(msgspec.Struct):
    prompt: str | list[str | int | list[int]] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_decode: Final = msgspec.json.Decoder(_Body).decode


class TokenNames:
    """`close` it: a template has a process."""

    def __init__(self, tokenizer: Path | None, chat_template: Path | None) -> None:
        """Without a tokenizer, only prompts that are given as tokens can be named. ConfigError
        where there is none in these files.
        """
        self._text: LoadedText | None = None
        if tokenizer is not None:
            self._text = load_text_of_any(tokenizer, chat_template=chat_template)
        self._tokenising = ThreadPoolExecutor(2, thread_name_prefix="headrace-tokens")
        # One, because a template renders one at a time.
        self._rendering = ThreadPoolExecutor(1, thread_name_prefix="headrace-template")

    def close(self) -> None:
        self._tokenising.shutdown(wait=False, cancel_futures=True)
        self._rendering.shutdown(wait=False, cancel_futures=True)
        if self._text is not None:
            self._text.close()

    async def name(self, ask: Ask, path: str, body: bytes, *, is_adapter: bool) -> Ask:
        """The same with names by tokens, if possible. `is_adapter`: its model is one."""
        try:
            fields = _decode(body)
            tokens = await self._tokens(path, fields)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, HeadraceError):
            return ask
        except TimeoutError:
            return ask
        if tokens is None or min(tokens, default=0) < 0 or max(tokens, default=0) >= 1 << 32:
            return ask
        root = prompt_root(ask.model if is_adapter else "", fields.cache_salt or "")
        return msgspec.structs.replace(
            ask,
            block_names=prompt_names(root, tokens, MAX_BLOCKS),
            num_tokens=max(ask.num_tokens, 1) if _has_several(fields) else len(tokens),
            is_named_by_tokens=True,
        )

    async def _tokens(self, path: str, fields: _Body) -> list[int] | None:
        """Of the prompt, or of the first of several."""
        if path == _CHAT and fields.messages:
            return await self._of_chat(fields.messages, fields)
        if path != _COMPLETIONS:
            return None
        match fields.prompt:
            case str(text) | [str(text), *_]:
                return await self._encoded(text, add_special=fields.add_special_tokens is not False)
            case [int(), *_] as tokens:
                return [token for token in tokens if isinstance(token, int)]
            case [list(tokens), *_]:
                return tokens
            case _:
                return None

    async def _of_chat(self, messages: list[dict[str, Any]], fields: _Body) -> list[int] | None:
        shown = [_shown(message) for message in messages]
        is_own = fields.chat_template is not None or fields.continue_final_message
        if self._text is None or self._text.chat_template is None or is_own or None in shown:
            return None
        render = partial(
            self._text.chat_template.render,
            [message for message in shown if message is not None],
            add_generation_prompt=fields.add_generation_prompt is not False,
            tools=fields.tools or None,
            **(fields.chat_template_kwargs or {}),
        )
        async with asyncio.timeout(RENDER_WAIT_S):
            text = await asyncio.get_running_loop().run_in_executor(self._rendering, render)
        return await self._encoded(text, add_special=bool(fields.add_special_tokens))

    async def _encoded(self, text: str, *, add_special: bool) -> list[int] | None:
        if self._text is None or len(text) > MAX_CHARS:
            return None
        encode = partial(self._text.tokenizer.encode, text, add_special=add_special)
        return await self._beside(len(text), encode)

    async def _beside(self, num_chars: int, make: Callable[[], _Value]) -> _Value:
        if num_chars <= OFFLOAD_CHARS:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._tokenising, make)


def _has_several(fields: _Body) -> bool:
    given = fields.prompt
    return isinstance(given, list) and len(given) > 1 and not isinstance(given[0], int)


def _shown(message: dict[str, Any]) -> dict[str, Any] | None:
    """A message as templates get it, its text in one piece; None where it is more than text."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        if not all(isinstance(text, str) for text in texts):
            return None
        content = "\n".join(map(str, texts))
    given = {name: value for name, value in message.items() if value is not None}
    return given | {"content": content or ""}
