"""Every member of the Llama family, small and random, computes what `transformers` computes."""

from pathlib import Path
from typing import Any

import pytest

from golden.test_reference import make_backend
from headrace.core.base.types import BlockId
from headrace.models.load import load_model
from headrace.ops.interface import StepBatch
from support.greedy import compile_model
from support.groups import write_pair
from support.model_files import VOCAB, tokenizer_json, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,  # wide enough for attention that is not flat
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, wide heads": ("llama", {"head_dim": 32}),
    "llama, biases": ("llama", {"attention_bias": True}),
    "llama, long": ("llama", {"rope_parameters": LLAMA3}),
    "llama, stretched": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 128}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
}


def saved(member: str, folder: Path) -> Any:
    """A random model of the family, written to `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes = FAMILY[member]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | changes)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith(".bias"):  # else they would be all ones or zeros
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    model.save_pretrained(folder)
    write(folder / "tokenizer.json", tokenizer_json())
    return model


@pytest.mark.parametrize("backend_name", ["torch", "native-f32-f32"])
@pytest.mark.parametrize("member", FAMILY)
def test_logits_equal_those_of_transformers(tmp_path: Path, member: str, backend_name: str) -> None:
    check_logits(tmp_path, saved(member, tmp_path), backend_name)


@pytest.mark.parametrize("backend_name", ["torch", "native-f32-f32"])
@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "awq", "bits": 4, "group_size": 64},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True},
    ],
)
def test_logits_of_matrices_in_groups(
    tmp_path: Path, quantization: dict[str, Any], backend_name: str
) -> None:
    """`transformers` computes with what the integers mean."""
    from transformers import AutoModelForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    grouped, plain = write_pair(tmp_path, quantization, sizes)
    check_logits(grouped, AutoModelForCausalLM.from_pretrained(plain).float().eval(), backend_name)


def check_logits(path: Path, model: Any, backend_name: str) -> None:
    import torch

    tokens = torch.randint(VOCAB, (100,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        theirs = model(tokens[None]).logits[0]

    backend = make_backend(backend_name)
    loaded = load_model(path, backend)
    program = compile_model(backend, loaded.model, num_blocks=7, max_tokens=100)
    table = [BlockId(i) for i in range(7)]
    program.run(StepBatch(tokens.tolist(), [0, 100], [0], [table], list(range(100))))
    ours = torch.tensor(program.logits())

    # What the bf16 KV cache leaves, in units of the logits' spread: seen are 0.003 in the mean and
    # 0.02 at most. A wrong rotation gives 0.7 and 5.
    differences = (ours - theirs).abs() / theirs.std()
    assert differences.mean() < 0.005
    assert differences.max() < 0.04
