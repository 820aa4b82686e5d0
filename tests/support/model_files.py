"""Model files written byte by byte, so that tests can also write wrong ones."""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.ops.interface import Program, TensorView

Metadata = Mapping[str, object]
Tensors = Mapping[
    str, tuple[int, Sequence[int], bytes]
]  # name -> (GGUF type, row-major shape, data)

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 = 0, 1, 2, 3, 6, 7, 8
Q2_K, Q4_K, Q5_K, Q6_K = 10, 12, 13, 14


def gguf_string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def gguf_value(value: object) -> bytes:
    """Type and value. Lists are of strings, floats or int32."""
    match value:
        case bool():
            return struct.pack("<IB", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + gguf_string(value)
        case [*items] if all(isinstance(item, str) for item in items):
            body = b"".join(gguf_string(str(item)) for item in items)
            return struct.pack("<IIQ", 9, 8, len(items)) + body
        case [*items]:
            kind, letter = (6, "f") if isinstance(items[0], float) else (5, "i")
            return struct.pack(f"<IIQ{len(items)}{letter}", 9, kind, len(items), *items)
    raise TypeError(type(value))


def gguf_bytes(
    metadata: Metadata, tensors: Tensors, *, version: int = 3, alignment: int = 32
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += gguf_string(key) + gguf_value(value)
    body = b""
    for name, (type_, shape, data) in tensors.items():
        body += bytes(-len(body) % alignment)
        head += gguf_string(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", type_, len(body))
        body += data
    return head + bytes(-len(head) % alignment) + body


def shard_bytes(tensors: Mapping[str, tuple[str, Sequence[int], bytes]]) -> bytes:
    """A .safetensors file: name -> (dtype, shape, data)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, (dtype, shape, data) in tensors.items():
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        body += data
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + body


def write(path: Path, data: bytes | str | dict[str, object]) -> Path:
    if isinstance(data, dict):
        data = json.dumps(data)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


# A Llama of two layers with a vocabulary of bytes and a few merges.

HIDDEN, MLP, HEADS, KV_HEADS, LAYERS = 32, 64, 4, 2, 2


def byte_vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, kinds and merges: two specials, 256 bytes as GPT-2 spells them, three merges."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    spelled = [
        chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)
    ]
    tokens = ["<|endoftext|>", "<|im_end|>", *spelled, "th", "Ġt", "Ġth"]
    return tokens, [3, 3] + [1] * 259, ["t h", "Ġ t", "Ġt h"]


TOKENS, KINDS, MERGES = byte_vocabulary()
VOCAB = len(TOKENS)


def llama_metadata(**changes: object) -> dict[str, object]:
    """Keys may be spelled with `__` for a dot; a value of None leaves the key out."""
    values: dict[str, object] = {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": MLP,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10_000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": KINDS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}"
        "{% endfor %}",
    }
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in values.items() if value is not None}


def llama_shapes(layer: str, names: Sequence[str], ends: Sequence[str]) -> dict[str, list[int]]:
    """Shapes by name; `names` are a layer's in the order below, `ends` embedding and norm."""
    kv = HIDDEN // HEADS * KV_HEADS
    sizes = [
        [HIDDEN], [HIDDEN, HIDDEN], [kv, HIDDEN], [kv, HIDDEN], [HIDDEN, HIDDEN],
        [HIDDEN], [MLP, HIDDEN], [MLP, HIDDEN], [HIDDEN, MLP],
    ]  # fmt: skip
    shapes = {ends[0]: [VOCAB, HIDDEN], ends[1]: [HIDDEN]}
    for i in range(LAYERS):
        shapes |= {layer.format(i) + name: size for name, size in zip(names, sizes, strict=True)}
    return shapes


GGUF_SHAPES = llama_shapes(
    "blk.{}.",
    [
        f"{name}.weight"
        for name in (
            *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"),
            *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
        )
    ],
    ["token_embd.weight", "output_norm.weight"],
)

FOLDER_SHAPES = llama_shapes(
    "model.layers.{}.",
    [
        "input_layernorm.weight",
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        "post_attention_layernorm.weight",
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    ],
    ["model.embed_tokens.weight", "model.norm.weight"],
)


def zeros(shape: Sequence[int], value_bytes: int = 4) -> bytes:
    total = value_bytes
    for size in shape:
        total *= size
    return bytes(total)


def gguf_tensors() -> dict[str, tuple[int, Sequence[int], bytes]]:
    return {name: (F32, shape, zeros(shape)) for name, shape in GGUF_SHAPES.items()}


def llama_config(**changes: object) -> dict[str, object]:
    values: dict[str, object] = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "bos_token_id": 0,
    }
    values |= changes
    return {key: value for key, value in values.items() if value is not None}


def folder_tensors() -> dict[str, tuple[str, Sequence[int], bytes]]:
    return {name: ("BF16", shape, zeros(shape, 2)) for name, shape in FOLDER_SHAPES.items()}


def tokenizer_json() -> dict[str, object]:
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": id_, "content": text, "special": True, "normalized": False,
                "single_word": False, "lstrip": False, "rstrip": False,
            }
            for id_, text in enumerate(TOKENS[:2])
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
        "model": {
            "type": "BPE",
            "vocab": {text: id_ for id_, text in enumerate(TOKENS)},
            "merges": MERGES,
        },
    }  # fmt: skip


def write_folder(folder: Path, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    write(folder / "config.json", llama_config(**config))
    write(folder / "tokenizer.json", tokenizer_json())
    write(folder / "model.safetensors", shard_bytes(folder_tensors()))
    return folder


class RecordingBackend:
    """Keeps what a loader hands it; weight handles are names."""

    name = "recording"
    batch_invariant = True
    arithmetic = "none"

    def __init__(self) -> None:
        self.loaded: dict[str, tuple[str, int, int, bytes]] = {}

    def load_weight(self, view: TensorView) -> str:
        self.loaded[view.name] = (view.type.value, view.rows, view.cols, bytes(view.data))
        return view.name

    def weight_bytes(self) -> int:
        return sum(len(data) for _, _, _, data in self.loaded.values())

    def compile(
        self, forward: object, kv: object, max_tokens: int, kv_file: object = None
    ) -> Program:
        raise NotImplementedError
