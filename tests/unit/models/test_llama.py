"""The forward pass as a line of operations: which come, in which order, on which weights."""

from collections.abc import Sequence
from pathlib import Path

from headrace.models.load import load_model
from headrace.ops.interface import AttentionSpec, Rope
from support.model_files import (
    LAYERS,
    RecordingBackend,
    gguf_bytes,
    gguf_tensors,
    llama_metadata,
    write,
    write_folder,
)


class TracingOps:
    """Handles are texts that say how a value came about."""

    def __init__(self) -> None:
        self.attentions: list[tuple[int, AttentionSpec, Rope]] = []

    def embed(self, table: str) -> str:
        return f"embed({table})"

    def rms_norm(self, x: str, weight: str, eps: float) -> str:
        return f"norm({x}, {weight}, {eps:g})"

    def linear(self, x: str, weights: Sequence[str], biases: Sequence[str | None] = ()) -> str:
        return f"linear({x}, {'|'.join(weights)}, {'|'.join(map(str, biases))})"

    def add(self, x: str, y: str) -> str:
        return f"add({x}, {y})"

    def silu_mul(self, gate_up: str) -> str:
        return f"silu({gate_up})"

    def attention(self, qkv: str, layer: int, spec: AttentionSpec, rope: Rope) -> str:
        self.attentions.append((layer, spec, rope))
        return f"attend{layer}({qkv})"

    def select_logit_rows(self, x: str) -> str:
        return f"select({x})"


def expected(layer: str, biases: str = "") -> str:
    """The definition of the architecture, for names of GGUF files."""
    x = "embed(token_embd.weight)"
    for i in range(LAYERS):
        p = layer.format(i)
        normed = f"norm({x}, {p}attn_norm.weight, 1e-05)"
        qkv_biases = "|".join(f"{p}attn_{n}.bias" for n in biases)
        qkv = "|".join(f"{p}attn_{n}.weight" for n in "qkv")
        seen = f"attend{i}(linear({normed}, {qkv}, {qkv_biases}))"
        x = f"add({x}, linear({seen}, {p}attn_output.weight, ))"
        normed = f"norm({x}, {p}ffn_norm.weight, 1e-05)"
        gate_up = f"linear({normed}, {p}ffn_gate.weight|{p}ffn_up.weight, )"
        x = f"add({x}, linear(silu({gate_up}), {p}ffn_down.weight, ))"
    return f"linear(norm(select({x}), output_norm.weight, 1e-05), token_embd.weight, )"


def test_forward_is_the_architecture(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", gguf_bytes(llama_metadata(), gguf_tensors()))
    ops = TracingOps()
    assert load_model(path, RecordingBackend()).model.forward(ops) == expected("blk.{}.")
    assert [layer for layer, _, _ in ops.attentions] == list(range(LAYERS))
    assert ops.attentions[0][1] == AttentionSpec(4, 2, 8, 8**-0.5)
    assert ops.attentions[0][2].interleaved
    assert len(ops.attentions[0][2].inv_freq) == 4


def test_a_folder_is_the_same_line_under_other_names(tmp_path: Path) -> None:
    ops = TracingOps()
    loaded = load_model(write_folder(tmp_path / "tiny"), RecordingBackend())
    trace = loaded.model.forward(ops)
    for theirs, ours in [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("model.layers.", "blk."),
        ("post_attention_layernorm", "ffn_norm"),
        ("input_layernorm", "attn_norm"),
        ("self_attn.o_proj", "attn_output"),
        *((f"self_attn.{n}_proj", f"attn_{n}") for n in "qkv"),
        *((f"mlp.{n}_proj", f"ffn_{n}") for n in ("gate", "up", "down")),
    ]:
        trace = trace.replace(theirs, ours)
    assert trace == expected("blk.{}.")
    assert not ops.attentions[0][2].interleaved
