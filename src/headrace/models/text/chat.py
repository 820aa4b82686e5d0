"""A conversation to prompt tokens, through a chat template."""

from collections.abc import Sequence
from typing import Any

from headrace.models.text.template import ChatTemplate
from headrace.models.text.tokenizer import Tokenizer


def encode_chat(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[dict[str, Any]]
) -> tuple[str, list[int]]:
    """The prompt as text and as tokens. Special tokens are the template's only: where a message
    spells one, it stays text. Blocks, and raises, as ChatTemplate.render does.
    """
    literal = tokenizer.literal
    if not literal.is_needed(messages):
        text = template.render(list(messages))
        return text, tokenizer.encode(text, add_special=False)
    hidden = template.render(literal.hide(messages))
    return literal.show(hidden), literal.encode(hidden)
