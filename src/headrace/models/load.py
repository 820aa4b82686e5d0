"""From a path to a model that can run: which file it is, which architecture, its tokenizer and its
chat template.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.base.errors import ConfigError
from headrace.models.facts import Facts, naming
from headrace.models.files import read_bounded, read_text
from headrace.models.gguf import GgufFile
from headrace.models.groups import Grouping, grouping_from_config
from headrace.models.llama import Llama, LlamaNames, LlamaShape
from headrace.models.llama_files import (
    FOLDER_NAMES,
    GGUF_NAMES,
    shape_from_config,
    shape_from_gguf,
)
from headrace.models.safetensors import MAX_JSON_BYTES, ModelFolder, SafetensorsFolder
from headrace.models.tensors import OnProgress, StoredTensor, WeightReader
from headrace.models.text.template import MAX_SOURCE_CHARS, ChatTemplate
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.vocabulary import tokenizer_from_folder, tokenizer_from_gguf
from headrace.ops.interface import Backend, Model

# Names that files give to architectures -> what runs them. One family so far; they differ in
# numbers only.
ARCHITECTURES = {"llama": Llama, "mistral": Llama, "qwen2": Llama}

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a person wants to know of a loaded model."""

    name: str
    architecture: str
    num_parameters: int
    weight_types: str  # of the matrices, the one with the most bytes first: "q4_1 + q8_0"
    file_bytes: int


class LoadedText(msgspec.Struct, frozen=True):
    """What turns text into tokens and back; no weights."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    def close(self) -> None:
        """End the process of the chat template. Idempotent."""
        if self.chat_template is not None:
            self.chat_template.close()


class LoadedModel(LoadedText, frozen=True):
    model: Model[Any, Any]
    description: ModelDescription


def load_model(
    path: Path,
    backend: Backend[Any, Any],
    *,
    max_model_len: int = 0,
    chat_template: Path | None = None,
    on_progress: OnProgress | None = None,
) -> LoadedModel:
    """Load a GGUF file or a folder of safetensors into `backend`.

    `max_model_len` 0 = all that the model allows; `chat_template` is a file with a Jinja template
    that replaces the model's own. Whatever is wrong with the files is a ConfigError of one line.
    """
    source = _open(path)
    with ExitStack() as undo:
        # It comes up in its own process while the weights are read.
        template, check = _begin_template(path, source.text, chat_template)
        if template is not None:
            undo.callback(template.close)
        model, weights = _model(path, source, backend, max_model_len, on_progress)
        check()
        undo.pop_all()
    return LoadedModel(
        model=model,
        tokenizer=source.text.tokenizer,
        chat_template=template,
        description=ModelDescription(
            name=_name(path),
            architecture=source.architecture,
            num_parameters=weights.num_parameters,
            weight_types=weights.weight_types,
            file_bytes=source.file_bytes,
        ),
    )


def load_text(path: Path, *, chat_template: Path | None = None) -> LoadedText:
    """The text part of what `load_model` loads, from the same files."""
    return _load_text(path, _open(path).text, chat_template)


def load_text_of_any(path: Path, *, chat_template: Path | None = None) -> LoadedText:
    """The same for a model of any architecture; a folder needs no weights."""
    if path.is_dir():
        return _load_text(path, _folder_text(ModelFolder(path)), chat_template)
    _check_is_model_file(path)
    return _load_text(path, _gguf_text(path, GgufFile(path).metadata), chat_template)


def _load_text(path: Path, text: "_Text", chat_template: Path | None) -> LoadedText:
    template, check = _begin_template(path, text, chat_template)
    try:
        check()
    except BaseException:
        if template is not None:
            template.close()
        raise
    return LoadedText(text.tokenizer, template)


def _open(path: Path) -> "_Source":
    if path.is_dir():
        return _open_folder(path)
    _check_is_model_file(path)
    return _open_gguf(path)


def _begin_template(
    path: Path, text: "_Text", replacement: Path | None
) -> tuple[ChatTemplate | None, Callable[[], None]]:
    """The template, and what to call before it is used: ConfigError where it is none."""
    given = None if replacement is None else _replacement(replacement)
    with naming(replacement or path):
        template = _template(text, given)

    def check() -> None:
        if template is not None:
            with naming(replacement or path):
                template.check()

    return template, check


def _model(
    path: Path,
    source: "_Source",
    backend: Backend[Any, Any],
    max_model_len: int,
    on_progress: OnProgress | None,
) -> tuple[Model[Any, Any], WeightReader[Any]]:
    weights = WeightReader(path, source.tensors, backend, on_progress, source.grouping)
    shape = source.shape(weights)
    if source.text.tokenizer.vocab_size > shape.vocab_size:
        raise ConfigError(
            f"{path}: the tokenizer has {source.text.tokenizer.vocab_size} tokens,"
            f" the model {shape.vocab_size}",
            hint="tokenizer and weights are not of the same model",
        )
    model_class = ARCHITECTURES[source.architecture]
    return model_class(shape, source.names, weights, max_model_len), weights


class _Text(msgspec.Struct, frozen=True):
    """What both kinds of files say of text."""

    tokenizer: Tokenizer
    chat_template: str  # "" = none
    bos_token: str
    eos_token: str


class _Source(msgspec.Struct, frozen=True):
    """What both kinds of files come down to."""

    architecture: str
    tensors: Mapping[str, StoredTensor]
    file_bytes: int
    names: LlamaNames
    shape: Callable[[WeightReader[Any]], LlamaShape]
    text: _Text
    grouping: Grouping | None = None


def _open_gguf(path: Path) -> _Source:
    file = GgufFile(path)
    facts = Facts(path, file.metadata)
    architecture = _known(path, facts.text("general.architecture"))
    return _Source(
        architecture=architecture,
        tensors=file.tensors,
        file_bytes=file.file_bytes,
        names=GGUF_NAMES,
        shape=partial(shape_from_gguf, path, file.metadata, architecture),
        text=_gguf_text(path, file.metadata),
    )


def _gguf_text(path: Path, metadata: Mapping[str, object]) -> _Text:
    tokenizer = tokenizer_from_gguf(path, metadata)
    return _Text(
        tokenizer=tokenizer,
        chat_template=Facts(path, metadata).text("tokenizer.chat_template", ""),
        bos_token=_token_text(tokenizer, None, tokenizer.bos_token_id),
        eos_token=_token_text(tokenizer, None, tokenizer.named_eos),
    )


def _open_folder(path: Path) -> _Source:
    folder = SafetensorsFolder(path)
    config = path / "config.json"
    facts = Facts(config, folder.config)
    architecture = _known(config, facts.text("model_type"))
    shape = shape_from_config(config, folder.config, architecture)
    return _Source(
        architecture=architecture,
        tensors=folder.tensors,
        file_bytes=folder.file_bytes,
        names=FOLDER_NAMES,
        shape=lambda weights: shape,
        text=_folder_text(folder),
        grouping=grouping_from_config(facts),
    )


def _folder_text(folder: ModelFolder) -> _Text:
    tokenizer = tokenizer_from_folder(folder)
    settings = folder.json("tokenizer_config.json") or {}
    return _Text(
        tokenizer=tokenizer,
        chat_template=_folder_template(folder, settings),
        bos_token=_token_text(tokenizer, settings.get("bos_token"), tokenizer.bos_token_id),
        eos_token=_token_text(tokenizer, settings.get("eos_token"), tokenizer.named_eos),
    )


def _check_is_model_file(path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file or folder")
    if path.suffix in _PICKLED:
        raise ConfigError(
            f"{path}: only safetensors and GGUF are read: pickled weights can run code",
            hint="convert the model to safetensors",
        )
    if path.suffix == ".safetensors":
        raise ConfigError(
            f"{path}: weights alone are not a model", hint="name the folder with its config.json"
        )


def _known(path: Path, architecture: str) -> str:
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{path}: architecture {architecture!r} is not supported;"
            f" supported are {', '.join(ARCHITECTURES)}"
        )
    return architecture


def _folder_template(folder: ModelFolder, tokenizer_config: Mapping[str, object]) -> str:
    """The template's own file, or the entry in tokenizer_config.json: a text, or a list with one
    named "default".
    """
    path = folder.path / "chat_template.jinja"
    if path.is_file():
        return read_bounded(path, MAX_JSON_BYTES).decode("utf-8", "replace")
    entry = tokenizer_config.get("chat_template")
    if isinstance(entry, list):
        named = {e.get("name"): e.get("template") for e in entry if isinstance(e, dict)}
        entry = named.get("default")
    return entry if isinstance(entry, str) else ""


def _template(text: _Text, replacement: str | None) -> ChatTemplate | None:
    source = text.chat_template if replacement is None else replacement
    if not source:
        return None
    return ChatTemplate(source, bos_token=text.bos_token, eos_token=text.eos_token)


def _replacement(path: Path) -> str:
    text = read_text(path, 4 * MAX_SOURCE_CHARS)
    if not text.strip():
        raise ConfigError(
            f"{path}: the chat template is empty",
            hint="leave it out for the model's own, if it has one",
        )
    return text


def _name(path: Path) -> str:
    """The file's or folder's name; for a folder in the hub's cache, the name it has on the hub."""
    path = Path(os.path.abspath(path))
    if path.parent.name == "snapshots":
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name.removesuffix(".gguf")


def _token_text(tokenizer: Tokenizer, configured: object, id_: int | None) -> str:
    if isinstance(configured, dict):
        configured = configured.get("content")
    if isinstance(configured, str):
        return configured
    return "" if id_ is None else tokenizer.token_text(id_)
