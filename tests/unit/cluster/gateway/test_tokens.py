"""Names of prompts by their tokens: those that an engine with this tokenizer computes."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cluster.gateway.ask import Ask, read_ask
from headrace.cluster.gateway.kv_blocks import prompt_names, prompt_root
from headrace.cluster.gateway.tokens import TokenNames
from headrace.core.base.errors import ConfigError
from support.fake_engine import TEMPLATE, byte_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "What is it that runs all day and never walks? " * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's text files, without weights and of no known architecture. Token i is byte i."""
    path = tmp_path_factory.mktemp("model")
    byte_tokenizer()._library.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(
        TEMPLATE + "{% if tools %}{{ tools | length }}{% endif %}"
    )
    return path


@pytest.fixture(scope="module")
def names(folder: Path) -> Iterator[TokenNames]:
    made = TokenNames(folder, None)
    yield made
    made.close()


def named(names: TokenNames, path: str, *, is_adapter: bool = False, **fields: Any) -> Ask:
    body = json.dumps(fields).encode()
    return asyncio.run(names.name(read_ask(path, body), path, body, is_adapter=is_adapter))


def of_text(text: str, adapter: str = "", salt: str = "") -> tuple[bytes, ...]:
    return prompt_names(prompt_root(adapter, salt), list(text.encode()), 1000)


def test_a_text_and_its_tokens_are_one_prompt(names: TokenNames) -> None:
    tokens = list(TEXT.encode())
    for given in (TEXT, tokens, [TEXT], [tokens], [tokens, [1, 2]]):
        ask = named(names, COMPLETIONS, prompt=given)
        assert ask.block_names == of_text(TEXT)
        assert ask.is_named_by_tokens
    assert named(names, COMPLETIONS, prompt=TEXT).num_tokens == len(tokens)
    # Of several prompts, the size of all counts.
    assert named(names, COMPLETIONS, prompt=[TEXT] * 9).num_tokens > len(tokens)


def test_a_chat_is_what_the_template_makes_of_it(names: TokenNames) -> None:
    wanted = f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n"
    tokens = byte_tokenizer().encode(wanted)
    assert tokens[0] == 256
    message = {"role": "user", "content": TEXT, "name": None}
    ask = named(names, CHAT, messages=[message])
    assert (ask.num_tokens, ask.is_named_by_tokens) == (len(tokens), True)
    assert ask.block_names == prompt_names(prompt_root(), tokens, 1000)
    parts = [{"type": "text", "text": TEXT}]
    assert named(names, CHAT, messages=[message | {"content": parts}]).block_names == (
        ask.block_names
    )
    shorter = named(names, CHAT, messages=[message], add_generation_prompt=False)
    assert shorter.num_tokens == len(tokens) - len("<|im_start|>assistant\n") + 11
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert named(names, CHAT, messages=[message], tools=tools).num_tokens == len(tokens) + 1
    loud = named(names, CHAT, messages=[message], chat_template_kwargs={"shout": "HO"})
    assert loud.num_tokens == len(tokens) + 2


def test_salts_and_adapters_keep_prompts_apart(names: TokenNames) -> None:
    ask = named(names, COMPLETIONS, prompt=TEXT, model="poet", cache_salt="s", is_adapter=True)
    assert ask.block_names == of_text(TEXT, "poet", "s")
    assert named(names, COMPLETIONS, prompt=TEXT, model="poet").block_names == of_text(TEXT)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": TEXT}),
        ("/v1/embeddings", {"input": TEXT}),
        (COMPLETIONS, {"prompt": 7}),
        (COMPLETIONS, {"prompt": [-1] * 100}),
        (COMPLETIONS, {"prompt": [1 << 40] * 100}),
        (COMPLETIONS, {"prompt": TEXT, "cache_salt": 7}),
        (COMPLETIONS, {"prompt": "x" * (1 << 20) + "y"}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": "none"}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        (CHAT, {"messages": [{"role": "user", "content": TEXT}], "chat_template": "x"}),
        (CHAT, {"messages": [{"content": TEXT}], "continue_final_message": True}),
        (CHAT, {"messages": [{"content": TEXT}], "chat_template_kwargs": {"messages": 1}}),
    ],
)
def test_what_cannot_be_named_by_tokens_keeps_its_names(
    names: TokenNames, path: str, fields: dict[str, Any]
) -> None:
    body = json.dumps(fields).encode()
    ask = named(names, path, **fields)
    assert ask == read_ask(path, body)
    assert not ask.is_named_by_tokens


def test_without_a_tokenizer_tokens_have_names(folder: Path) -> None:
    names = TokenNames(None, None)
    assert named(names, COMPLETIONS, prompt=list(TEXT.encode())).block_names == of_text(TEXT)
    for path, fields in ((COMPLETIONS, {"prompt": TEXT}), (CHAT, {"messages": [{}]})):
        assert not named(names, path, **fields).is_named_by_tokens
    names.close()


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        TokenNames(tmp_path, None)
    with pytest.raises(ConfigError, match="no such file"):
        TokenNames(tmp_path / "missing", None)
