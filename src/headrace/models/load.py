"""From a path to a model that can run: which file it is, which architecture, its tokenizer and its
chat template.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.base.errors import ConfigError
from headrace.models.facts import Facts
from headrace.models.gguf import GgufFile
from headrace.models.llama import Llama
from headrace.models.llama_files import (
    FOLDER_NAMES,
    GGUF_NAMES,
    shape_from_config,
    shape_from_gguf,
)
from headrace.models.safetensors import SafetensorsFolder, read_bounded
from headrace.models.tensors import OnProgress, WeightReader
from headrace.models.text.template import ChatTemplate
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


class LoadedModel(msgspec.Struct, frozen=True):
    model: Model[Any, Any]
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    description: ModelDescription


def load_model(
    path: Path,
    backend: Backend[Any, Any],
    *,
    max_model_len: int = 0,
    on_progress: OnProgress | None = None,
) -> LoadedModel:
    """Load a GGUF file or a folder of safetensors into `backend`.

    `max_model_len` 0 = all that the model allows. Everything that can be wrong with the files is a
    ConfigError of one line.
    """
    if path.is_dir():
        return _load_folder(path, backend, max_model_len, on_progress)
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
    return _load_gguf(path, backend, max_model_len, on_progress)


def _load_gguf(
    path: Path, backend: Backend[Any, Any], max_model_len: int, on_progress: OnProgress | None
) -> LoadedModel:
    file = GgufFile(path)
    facts = Facts(path, file.metadata)
    architecture = facts.text("general.architecture")
    model_class = _architecture(path, architecture)
    tokenizer = tokenizer_from_gguf(path, file.metadata)
    weights = WeightReader(path, file.tensors, backend, on_progress)
    shape = shape_from_gguf(path, file.metadata, architecture, weights)
    _check_vocabulary(path, tokenizer, shape.vocab_size)
    model = model_class(shape, GGUF_NAMES, weights, max_model_len)
    source = facts.text("tokenizer.chat_template", "")
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        chat_template=_template(source, tokenizer, {}),
        description=ModelDescription(
            name=path.stem,
            architecture=architecture,
            num_parameters=weights.num_parameters,
            weight_types=weights.weight_types,
            file_bytes=file.file_bytes,
        ),
    )


def _load_folder(
    path: Path, backend: Backend[Any, Any], max_model_len: int, on_progress: OnProgress | None
) -> LoadedModel:
    folder = SafetensorsFolder(path)
    architecture = Facts(path / "config.json", folder.config).text("model_type")
    model_class = _architecture(path, architecture)
    shape = shape_from_config(path / "config.json", folder.config, architecture)
    tokenizer = tokenizer_from_folder(folder)
    _check_vocabulary(path, tokenizer, shape.vocab_size)
    weights = WeightReader(path, folder.tensors, backend, on_progress)
    model = model_class(shape, FOLDER_NAMES, weights, max_model_len)
    tokenizer_config = folder.json("tokenizer_config.json") or {}
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        chat_template=_template(
            _folder_template(folder, tokenizer_config), tokenizer, tokenizer_config
        ),
        description=ModelDescription(
            name=path.resolve().name,
            architecture=architecture,
            num_parameters=weights.num_parameters,
            weight_types=weights.weight_types,
            file_bytes=folder.file_bytes,
        ),
    )


def _architecture(path: Path, name: str) -> type[Llama[Any, Any]]:
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{path}: architecture {name!r} is not supported;"
            f" supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def _check_vocabulary(path: Path, tokenizer: Tokenizer, num_embeddings: int) -> None:
    """A token without an embedding could not be computed."""
    if tokenizer.vocab_size > num_embeddings:
        raise ConfigError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model {num_embeddings}",
            hint="tokenizer and weights are not of the same model",
        )


def _folder_template(folder: SafetensorsFolder, tokenizer_config: Mapping[str, object]) -> str:
    """The template's own file, or the entry in tokenizer_config.json: a text, or a list with one
    named "default".
    """
    path = folder.path / "chat_template.jinja"
    if path.is_file():
        return read_bounded(path).decode("utf-8", "replace")
    entry = tokenizer_config.get("chat_template")
    if isinstance(entry, list):
        named = {e.get("name"): e.get("template") for e in entry if isinstance(e, dict)}
        entry = named.get("default")
    return entry if isinstance(entry, str) else ""


def _template(
    source: str, tokenizer: Tokenizer, tokenizer_config: Mapping[str, object]
) -> ChatTemplate | None:
    if not source:
        return None
    eos = tokenizer.named_eos
    return ChatTemplate(
        source,
        bos_token=_token_text(tokenizer, tokenizer_config.get("bos_token"), tokenizer.bos_token_id),
        eos_token=_token_text(tokenizer, tokenizer_config.get("eos_token"), eos),
    )


def _token_text(tokenizer: Tokenizer, configured: object, id_: int | None) -> str:
    if isinstance(configured, dict):
        configured = configured.get("content")
    if isinstance(configured, str):
        return configured
    return "" if id_ is None else tokenizer.token_text(id_)
