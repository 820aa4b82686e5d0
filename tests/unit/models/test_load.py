"""Loading: the model that comes out, and one clear line for each way a file can be wrong."""

from pathlib import Path
from typing import Any

import pytest

from headrace.core.base.errors import ConfigError
from headrace.models import rope
from headrace.models.llama import Llama
from headrace.models.load import LoadedModel, load_model
from support.model_files import (
    F16,
    F32,
    GGUF_SHAPES,
    HIDDEN,
    KINDS,
    LAYERS,
    Q2_K,
    TOKENS,
    VOCAB,
    RecordingBackend,
    folder_tensors,
    gguf_bytes,
    gguf_tensors,
    llama_metadata,
    shard_bytes,
    write,
    write_folder,
    zeros,
)


def load_gguf(
    tmp_path: Path,
    metadata: dict[str, object] | None = None,
    tensors: dict[str, Any] | None = None,
    **options: Any,
) -> LoadedModel:
    data = gguf_bytes(metadata or llama_metadata(), tensors or gguf_tensors())
    return load_model(write(tmp_path / "tiny.gguf", data), RecordingBackend(), **options)


def llama(loaded: LoadedModel) -> Llama[Any, Any]:
    assert isinstance(loaded.model, Llama)
    return loaded.model


def fault(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        load_model(path, RecordingBackend())
    assert str(path) in raised.value.message
    assert "\n" not in raised.value.message
    return raised.value


def gguf_fault(
    tmp_path: Path, metadata: dict[str, object] | None = None, tensors: Any = None
) -> str:
    data = gguf_bytes(metadata or llama_metadata(), tensors or gguf_tensors())
    return fault(write(tmp_path / "tiny.gguf", data)).message


def folder_fault(tmp_path: Path, **config: object) -> str:
    return fault(write_folder(tmp_path / "tiny", **config)).message


def test_a_gguf_file(tmp_path: Path) -> None:
    loaded = load_gguf(tmp_path)
    model = llama(loaded)
    assert (model.vocab_size, model.max_model_len, model.num_layers) == (VOCAB, 128, LAYERS)
    assert (model.num_kv_heads, model.head_dim) == (2, 8)
    assert model.shape.tied_embeddings
    assert model.shape.rope.interleaved
    description = loaded.description
    assert (description.name, description.architecture) == ("tiny", "llama")
    assert description.weight_types == "f32"
    expected = sum(len(zeros(shape, 1)) for shape in GGUF_SHAPES.values())
    assert description.num_parameters == expected
    assert description.file_bytes == (tmp_path / "tiny.gguf").stat().st_size
    assert loaded.tokenizer.eos_token_ids == (0, 1)
    assert loaded.chat_template is not None
    assert loaded.chat_template.render([{"content": "x"}]) == "<|endoftext|>x"


def test_a_folder(tmp_path: Path) -> None:
    loaded = load_model(write_folder(tmp_path / "tiny"), RecordingBackend())
    model = llama(loaded)
    assert (model.vocab_size, model.max_model_len) == (VOCAB, 128)
    assert not model.shape.rope.interleaved
    assert loaded.description.weight_types == "bf16"
    assert loaded.tokenizer.bos_token_id == 0
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the")) == "the"
    assert loaded.chat_template is None


def test_every_tensor_reaches_the_backend_with_its_bytes(tmp_path: Path) -> None:
    tensors = {
        name: (F32, shape, bytes([i]) * len(zeros(shape)))
        for i, (name, shape) in enumerate(GGUF_SHAPES.items())
    }
    path = write(tmp_path / "tiny.gguf", gguf_bytes(llama_metadata(), tensors))
    backend = RecordingBackend()
    load_model(path, backend)
    assert backend.loaded == {
        name: ("f32", shape[0] if len(shape) == 2 else 1, shape[-1], data)
        for name, (_, shape, data) in tensors.items()
    }


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is called what a person called it, never what a cache calls its files."""
    snapshot = tmp_path / "models--org--my-model" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    assert load_model(write_folder(snapshot), RecordingBackend()).description.name == "org/my-model"
    blob = write(tmp_path / "blob", gguf_bytes(llama_metadata(), gguf_tensors()))
    (snapshot / "small.q8.gguf").symlink_to(blob)
    loaded = load_model(snapshot / "small.q8.gguf", RecordingBackend())
    assert loaded.description.name == "small.q8"
    monkeypatch.chdir(write_folder(tmp_path / "here"))
    assert load_model(Path("."), RecordingBackend()).description.name == "here"


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_gguf(tmp_path, on_progress=lambda done, total: seen.append((done, total)))
    assert len(seen) == len(GGUF_SHAPES)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


def test_heads_of_another_size_than_hidden_over_heads(tmp_path: Path) -> None:
    tensors = gguf_tensors()
    for i in range(LAYERS):
        for name, shape in [
            ("attn_q", [64, HIDDEN]),
            ("attn_k", [32, HIDDEN]),
            ("attn_v", [32, HIDDEN]),
            ("attn_output", [HIDDEN, 64]),
        ]:
            tensors[f"blk.{i}.{name}.weight"] = (F32, shape, zeros(shape))
    metadata = llama_metadata(llama__attention__key_length=16, llama__attention__value_length=16)
    assert llama(load_gguf(tmp_path, metadata, tensors)).head_dim == 16


def test_qwen2_has_biases_and_heads_in_halves(tmp_path: Path) -> None:
    metadata = {k.replace("llama.", "qwen2."): v for k, v in llama_metadata().items()}
    metadata["general.architecture"] = "qwen2"
    tensors = gguf_tensors()
    assert "blk.0.attn_q.bias is missing" in gguf_fault(tmp_path, metadata, tensors)
    for i in range(LAYERS):
        for name, size in (("q", HIDDEN), ("k", 16), ("v", 16)):
            tensors[f"blk.{i}.attn_{name}.bias"] = (F32, [size], zeros([size]))
    model = llama(load_gguf(tmp_path, metadata, tensors))
    assert model.shape.qkv_biases
    assert not model.shape.rope.interleaved


def test_a_separate_head_is_used(tmp_path: Path) -> None:
    tensors = gguf_tensors() | {"output.weight": (F32, [VOCAB, HIDDEN], zeros([VOCAB, HIDDEN]))}
    assert not llama(load_gguf(tmp_path, tensors=tensors)).shape.tied_embeddings


def test_factors_in_the_file_scale_the_frequencies(tmp_path: Path) -> None:
    import struct

    factors = {"rope_freqs.weight": (F32, [4], struct.pack("<4f", 1, 1, 2, 8))}
    model = llama(load_gguf(tmp_path, tensors=gguf_tensors() | factors))
    plain = rope.frequencies(8, 10_000.0)
    assert model.shape.rope.inv_freq == (plain[0], plain[1], plain[2] / 2, plain[3] / 8)


def test_a_sliding_window_bounds_the_length(tmp_path: Path) -> None:
    """Up to its window, sliding attention is full attention."""
    folder = write_folder(tmp_path / "m", model_type="mistral", sliding_window=64)
    assert load_model(folder, RecordingBackend()).model.max_model_len == 64
    folder = write_folder(tmp_path / "m", model_type="mistral", sliding_window=None)
    assert load_model(folder, RecordingBackend()).model.max_model_len == 128


def test_max_model_len(tmp_path: Path) -> None:
    assert load_gguf(tmp_path, max_model_len=50).model.max_model_len == 50
    with pytest.raises(ConfigError, match="context is 128 tokens, 129 are asked for"):
        load_gguf(tmp_path, max_model_len=129)


class TestDigest:
    """The digest tells apart whatever changes an output, and nothing else."""

    def digest(self, tmp_path: Path, metadata: Any = None, tensors: Any = None) -> str:
        return load_gguf(tmp_path, metadata, tensors).model.digest

    def test_is_hex_sha256(self, tmp_path: Path) -> None:
        digest = self.digest(tmp_path)
        assert len(digest) == 64
        assert int(digest, 16)

    def test_ignores_names_and_descriptions(self, tmp_path: Path) -> None:
        other = llama_metadata(general__name="another", llama__vocab_size=VOCAB)
        assert self.digest(tmp_path, other) == self.digest(tmp_path)

    @pytest.mark.parametrize("name", ["blk.1.ffn_down.weight", "output_norm.weight"])
    @pytest.mark.parametrize("end", [0, -1])
    def test_sees_a_changed_weight(self, tmp_path: Path, name: str, end: int) -> None:
        tensors = gguf_tensors()
        data = bytearray(tensors[name][2])
        data[end] ^= 1
        changed = tensors | {name: (F32, tensors[name][1], bytes(data))}
        assert self.digest(tmp_path, None, changed) != self.digest(tmp_path)

    def test_sees_both_ends_of_a_large_tensor(self, tmp_path: Path) -> None:
        name = "token_embd.weight"
        shape = [VOCAB, 2048]
        assert len(zeros(shape)) > 1 << 20
        digests = set()
        for position in (None, 0, -1):
            data = bytearray(zeros(shape))
            if position is not None:
                data[position] = 1
            from headrace.models.tensors import StoredTensor, WeightReader

            stored = StoredTensor(name, "f32", tuple(shape), memoryview(bytes(data)))
            reader = WeightReader(tmp_path, {name: stored}, RecordingBackend())
            reader.matrix(name, *shape)
            digests.add(reader.digest(b""))
        assert len(digests) == 3

    def test_sees_changed_numbers(self, tmp_path: Path) -> None:
        digests = {
            self.digest(tmp_path, llama_metadata(**{key: value}))
            for key, value in [
                ("general__name", "x"),
                ("llama__rope__freq_base", 5e5),
                ("llama__attention__layer_norm_rms_epsilon", 1e-6),
            ]
        }
        assert len(digests) == 3

    def test_sees_another_type_of_the_same_bytes(self, tmp_path: Path) -> None:
        zero = gguf_tensors()
        halves = zero | {"output_norm.weight": (F16, [HIDDEN], zeros([HIDDEN], 2))}
        assert self.digest(tmp_path, None, halves) != self.digest(tmp_path, None, zero)


def test_refuses_other_architectures(tmp_path: Path) -> None:
    message = gguf_fault(tmp_path, llama_metadata(general__architecture="mamba"))
    assert "architecture 'mamba' is not supported; supported are llama, mistral, qwen2" in message
    assert "'bert'" in folder_fault(tmp_path, model_type="bert")
    assert "general.architecture is missing" in gguf_fault(
        tmp_path, llama_metadata(general__architecture=None)
    )


def test_refuses_unsupported_types_by_tensor(tmp_path: Path) -> None:
    tensors = gguf_tensors() | {"blk.1.attn_k.weight": (Q2_K, [16, HIDDEN], bytes(4096))}
    message = gguf_fault(tmp_path, None, tensors)
    assert "tensor blk.1.attn_k.weight has type q2_k; supported are f32, f16, bf16" in message


def test_refuses_missing_extra_and_misshapen_tensors(tmp_path: Path) -> None:
    tensors = gguf_tensors()
    del tensors["blk.1.ffn_up.weight"]
    assert "tensor blk.1.ffn_up.weight is missing" in gguf_fault(tmp_path, None, tensors)
    extra = {"blk.0.attn_q_norm.weight": (F32, [8], zeros([8]))}
    message = gguf_fault(tmp_path, None, gguf_tensors() | extra)
    assert "attn_q_norm.weight is not part of the stated architecture" in message
    wrong = {"blk.0.attn_v.weight": (F32, [HIDDEN, HIDDEN], zeros([HIDDEN, HIDDEN]))}
    message = gguf_fault(tmp_path, None, gguf_tensors() | wrong)
    assert "attn_v.weight has shape [32, 32]; [16, 32] is needed" in message


def test_ignores_what_follows_from_the_rest(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    shape = [VOCAB, HIDDEN]
    tensors = folder_tensors() | {
        "lm_head.weight": ("BF16", shape, zeros(shape, 2)),
        "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", [4], zeros([4])),
    }
    write(folder / "model.safetensors", shard_bytes(tensors))
    assert llama(load_model(folder, RecordingBackend())).shape.tied_embeddings


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama__block_count", None, "llama.block_count is missing"),
        ("llama__block_count", 3, "blk.2.attn_norm.weight is missing"),
        ("llama__block_count", 1, "blk.1.attn_norm.weight is not part"),
        ("llama__block_count", 1 << 31, "llama.block_count is 2147483648"),
        ("llama__attention__head_count", 0, "head_count is 0"),
        ("llama__attention__head_count", 3, "do not share 2 KV heads"),
        ("llama__attention__head_count_kv", [2, 2], "head_count_kv is array"),
        ("llama__attention__value_length", 16, "keys and values of different sizes"),
        ("llama__attention__key_length", 1 << 30, "heads of 1073741824 values"),
        ("llama__embedding_length", 64, "tensor token_embd.weight has shape"),
        ("llama__rope__scaling__type", "yarn", "'yarn' is not supported"),
        ("split__count", 2, "one part of a split file"),
        ("tokenizer__ggml__model", "t5", "tokenizer 't5' is not supported"),
        ("tokenizer__ggml__pre", "viking", "pre-tokenizer 'viking' is not supported"),
        ("tokenizer__ggml__tokens", None, "holds no vocabulary"),
        ("tokenizer__ggml__token_type", [1, 2], "but 2 token types"),
        ("tokenizer__ggml__merges", ["th"], "merge 'th' is not a pair"),
        ("tokenizer__ggml__merges", ["q zz"], "no tokenizer can be built"),
        ("tokenizer__ggml__bos_token_id", VOCAB, "bos_token_id is 261"),
        ("tokenizer__chat_template", "{% for %}", "chat template cannot be compiled"),
    ],
)
def test_refuses_wrong_metadata(tmp_path: Path, key: str, value: object, message: str) -> None:
    assert message in gguf_fault(tmp_path, llama_metadata(**{key: value}))


def test_refuses_more_tokens_than_embeddings(tmp_path: Path) -> None:
    metadata = llama_metadata(
        tokenizer__ggml__tokens=[*TOKENS, "extra"], tokenizer__ggml__token_type=[*KINDS, 1]
    )
    assert "the tokenizer has 262 tokens, the model 261" in gguf_fault(tmp_path, metadata)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", None, "hidden_size is missing"),
        ("hidden_size", "32", "hidden_size is '32'"),
        ("hidden_act", "gelu", "activation 'gelu'"),
        ("mlp_bias", True, "biases in the MLP"),
        ("quantization_config", {"quant_method": "fp8"}, "quantised by 'fp8'"),
        ("tie_word_embeddings", False, "lm_head.weight is missing"),
        ("attention_bias", True, "q_proj.bias is missing"),
        ("num_hidden_layers", 10**30, "num_hidden_layers is 1000"),
        ("rms_norm_eps", 0, "rms_norm_eps is 0"),
        ("eos_token_id", "x", "eos_token_id is 'x'"),
    ],
)
def test_refuses_wrong_configs(tmp_path: Path, key: str, value: object, message: str) -> None:
    assert message in folder_fault(tmp_path, **{key: value})


def test_refuses_what_is_no_model(tmp_path: Path) -> None:
    assert "no such file" in fault(tmp_path / "absent.gguf").message
    for name in ("pytorch_model.bin", "model.pt"):
        assert "only safetensors and GGUF" in fault(write(tmp_path / name, b"\x80\x02")).message
    weights = write(tmp_path / "model.safetensors", shard_bytes(folder_tensors()))
    assert "weights alone" in fault(weights).message
    folder = write_folder(tmp_path / "no_tokenizer")
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer.json" in fault(folder).message
    write(folder / "tokenizer.json", "{}")
    assert "no tokenizer can be built" in fault(folder).message


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template.jinja": "J"}, "J"),
        ({"tokenizer_config.json": {"chat_template": "T"}}, "T"),
        ({"tokenizer_config.json": {"chat_template": "T"}, "chat_template.jinja": "J"}, "J"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "rag", "template": "R"},
                        {"name": "default", "template": "D"},
                    ]
                }
            },
            "D",
        ),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": "{{ bos_token }}{{ eos_token }}",
                    "bos_token": {"content": "<B>"},
                }
            },
            "<B><|im_end|>",
        ),
    ],
)
def test_where_a_folder_keeps_its_template(
    tmp_path: Path, files: dict[str, Any], expected: str
) -> None:
    folder = write_folder(tmp_path / "tiny")
    for name, data in files.items():
        write(folder / name, data)
    template = load_model(folder, RecordingBackend()).chat_template
    assert template is not None
    assert template.render([]) == expected


def test_every_end_of_text_of_a_folder_counts(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", eos_token_id=5)
    write(folder / "generation_config.json", {"eos_token_id": [5, 7]})
    tokenizer = load_model(folder, RecordingBackend()).tokenizer
    assert tokenizer.eos_token_ids == (0, 1, 5, 7)
    assert tokenizer.named_eos == 5


def test_a_template_from_outside_replaces_the_models_own(tmp_path: Path) -> None:
    broken = llama_metadata(tokenizer__chat_template="{% broken %}")
    loaded = load_gguf(
        tmp_path, broken, chat_template=write(tmp_path / "own.jinja", "{{ eos_token }}")
    )
    assert loaded.chat_template is not None
    assert loaded.chat_template.render([]) == "<|im_end|>"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("", "the chat template is empty"),
        (" \n", "the chat template is empty"),
        ("x" * (1 << 20) + "x", "longer than"),
        ("x" * (4 << 20) + "x", "larger than 4MiB"),
        (b"\xff", "not UTF-8 text"),
        ("{% broken %}", "cannot be compiled"),
    ],
    ids=["empty", "blank", "long", "huge", "binary", "broken"],
)
def test_faults_of_a_template_from_outside_name_its_file(
    tmp_path: Path, data: str | bytes, said: str
) -> None:
    path = write(tmp_path / "own.jinja", data)
    with pytest.raises(ConfigError, match=said) as caught:
        load_gguf(tmp_path, llama_metadata(), chat_template=path)
    assert caught.value.message.startswith(f"{path}: ")
