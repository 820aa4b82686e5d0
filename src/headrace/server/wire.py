"""The OpenAI dialect as types: what a body may hold and what an answer holds.

Requests are decoded strictly (no coercion); absent and null mean the same. Bounds are not here:
those of numbers are checked by the text engine, those of the server's own limits in `params`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

# ---- requests

# Fields of OpenAI and of other engines that would change the answer. Ignoring one would answer a
# different question, so a value that asks for anything is refused. Each stands with the values that
# ask for nothing.
_UNUSED: tuple[object, ...] = (None, False, [], {}, "")
REFUSED_FIELDS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(
        (
            "allowed_token_ids",
            "audio",
            "bad_words",
            "chat_template",
            "custom_logit_processor",
            "documents",
            "dry_multiplier",
            "dynatemp_range",
            "early_stopping",
            "ebnf",
            "function_call",
            "functions",
            "grammar",
            "guided_choice",
            "guided_grammar",
            "guided_json",
            "guided_regex",
            "json_schema",
            "logits_processors",
            "lora",
            "lora_path",
            "mirostat",
            "n_probs",
            "no_stop_trim",
            "prompt_embeds",
            "regex",
            "return_tokens_as_token_ids",
            "samplers",
            "stop_regex",
            "structural_tag",
            "structured_outputs",
            "truncate_prompt_tokens",
            "use_beam_search",
            "web_search_options",
            "xtc_probability",
        ),
        _UNUSED,
    ),
    "length_penalty": (None, 1),
    "modalities": (None, [], ["text"]),
    "n_predict": (None, -1),
    "num_predict": (None, -1),
    "reasoning_effort": (None, "none"),
    "repeat_penalty": (None, 1),
    "spaces_between_special_tokens": (None, True),
    "tfs_z": (None, 1),
    "top_a": (None, 0),
    "top_n_sigma": (None, -1, 0),
    "typical_p": (None, 1),
    "verbosity": (None, "medium"),
}


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    type: str


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that both endpoints know; OpenAI's names first, then vLLM's.

    `refused` names other fields that would change the answer, with the values that ask for nothing.
    """

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = REFUSED_FIELDS

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    best_of: int | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    refused = REFUSED_FIELDS | {
        "add_special_tokens": (None, True),
        "chat_template_kwargs": _UNUSED,
        "max_completion_tokens": (None,),
        "messages": _UNUSED,
        "tools": _UNUSED,
        "top_logprobs": (None,),
    }

    prompt: str | list[str | int | list[int]] = ""
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    refused = REFUSED_FIELDS | {
        "add_special_tokens": (None, False),
        "echo": _UNUSED,
        "prompt": _UNUSED,
        "suffix": _UNUSED,
    }

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


# ---- answers


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int  # 1 = most likely
    decoded_token: str


# For each prompt token: what the model thought of it, by token id; None for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # characters from the beginning of the prompt


class ChatMessage(msgspec.Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Whole answers and chunks have the same shape here, as OpenAI has it."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "headrace"
    root: str
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]
