"""Damaged model files: the answer is a model or a ConfigError of one line, quickly and in little
memory.
"""

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.base.errors import ConfigError
from headrace.models.load import load_model
from support.model_files import (
    FOLDER_SHAPES,
    HIDDEN,
    Q5_0,
    RecordingBackend,
    folder_tensors,
    gguf_bytes,
    gguf_tensors,
    llama_config,
    llama_metadata,
    shard_bytes,
    tokenizer_json,
    write,
    write_folder,
)

# Far above what the tiny model takes, far below what a damaged length could ask for.
MEMORY_BYTES = 64 << 20

QUANTISED = {"blk.0.attn_q.weight": (Q5_0, [HIDDEN, HIDDEN], bytes(HIDDEN * HIDDEN // 32 * 22))}
GGUF = gguf_bytes(llama_metadata(), gguf_tensors() | QUANTISED)
SHARD = shard_bytes(folder_tensors())
CONFIG, TOKENIZER = llama_config(), tokenizer_json()

# Numbers at which arithmetic on lengths goes wrong.
EDGES = [0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1]


def answers(path: Path) -> bool:
    """Whether the file is a model after all; fails on any outcome but a model or a ConfigError."""
    fault = ""
    tracemalloc.start()
    try:
        load_model(path, RecordingBackend())
    except ConfigError as error:
        fault = error.message
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MEMORY_BYTES
    assert "\n" not in fault
    assert len(fault) < 1000
    return not fault


@st.composite
def damaged(draw: st.DrawFn, data: bytes, head_bytes: int) -> bytes:
    """`data` after a few overwritten, inserted, removed or repeated bytes, mostly in its head."""
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.one_of(st.integers(0, head_bytes), st.integers(0, len(out))))
        match draw(st.sampled_from(["number", "bytes", "insert", "cut", "repeat", "truncate"])):
            case "number":
                size = draw(st.sampled_from([1, 2, 4, 8]))
                value = draw(st.sampled_from(EDGES)) % (1 << 8 * size)
                out[at : at + size] = value.to_bytes(size, "little")
            case "bytes":
                new = draw(st.binary(min_size=1, max_size=8))
                out[at : at + len(new)] = new
            case "insert":
                out[at:at] = draw(st.binary(min_size=1, max_size=16))
            case "cut":
                del out[at : at + draw(st.integers(1, 64))]
            case "repeat":
                out[at:at] = out[at : at + draw(st.integers(1, 64))]
            case "truncate":
                del out[at:]
    return bytes(out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def test_the_undamaged_files_are_models(folder: Path) -> None:
    assert answers(write(folder / "whole.gguf", GGUF))
    assert answers(write_folder(folder / "whole"))


@settings(max_examples=300)
@given(data=damaged(GGUF, 9000))
def test_damaged_gguf(folder: Path, data: bytes) -> None:
    answers(write(folder / "damaged.gguf", data))


@settings(max_examples=200)
@given(data=st.binary(max_size=200))
def test_anything_after_the_magic(folder: Path, data: bytes) -> None:
    assert not answers(write(folder / "any.gguf", b"GGUF\3\0\0\0" + data))


@settings(max_examples=200)
@given(data=damaged(SHARD, 2000))
def test_damaged_shards(folder: Path, data: bytes) -> None:
    model = write_folder(folder / "shard")
    write(model / "model.safetensors", data)
    answers(model)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(EDGES)
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(max_examples=200)
@given(changes=st.dictionaries(st.sampled_from(sorted(CONFIG)), JSON, min_size=1, max_size=3))
def test_wrong_configs(folder: Path, changes: dict[str, object]) -> None:
    model = write_folder(folder / "config")
    write(model / "config.json", CONFIG | changes)
    answers(model)


@settings(max_examples=100)
@given(key=st.sampled_from(sorted(TOKENIZER)), value=JSON)
def test_wrong_tokenizers(folder: Path, key: str, value: object) -> None:
    model = write_folder(folder / "tokenizer")
    write(model / "tokenizer.json", TOKENIZER | {key: value})
    answers(model)


@settings(max_examples=100)
@given(
    weight_map=st.dictionaries(
        st.sampled_from(sorted(FOLDER_SHAPES)) | st.text(max_size=5),
        st.sampled_from(["part.safetensors", "..", ".", "", "/", "a\0.safetensors"]) | JSON,
    )
)
def test_wrong_indices(folder: Path, weight_map: dict[str, object]) -> None:
    model = write_folder(folder / "index")
    (model / "model.safetensors").replace(model / "part.safetensors")
    write(model / "model.safetensors.index.json", {"weight_map": weight_map})
    answers(model)
