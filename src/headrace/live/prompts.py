"""Prompts to tokens, for callers in this process. Too long ones are refused before they are
tokenised.
"""

from collections.abc import Sequence
from typing import Any

from headrace.live.bounds import check_text
from headrace.models.text.template import ChatTemplate
from headrace.models.text.tokenizer import Tokenizer


def encode_text(tokenizer: Tokenizer, text: str, max_model_len: int) -> list[int]:
    """RequestError where the text has certainly no room in `max_model_len` tokens."""
    check_text(tokenizer, text, max_model_len)
    return tokenizer.encode(text)


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    max_model_len: int,
) -> tuple[str, list[int]]:
    """The prompt as text and as tokens. Special tokens are the template's only: where a message
    spells one, it stays text. Blocks, and raises, as ChatTemplate.render does, and as `encode_text`
    does.
    """
    literal = tokenizer.literal
    is_hidden = literal.is_needed(messages)
    rendered = template.render(literal.hide(messages) if is_hidden else list(messages))
    text = literal.show(rendered) if is_hidden else rendered
    check_text(tokenizer, text, max_model_len)
    if is_hidden:
        return text, literal.encode(rendered)
    return text, tokenizer.encode(text, add_special=False)
