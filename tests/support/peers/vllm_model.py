"""Writes a GGUF file's model as safetensors in bf16, in vLLM's environment, which reads no GGUF
files on a CPU: `python vllm_model.py FILE FOLDER`.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(gguf: str, folder: str) -> None:
    where = {"pretrained_model_name_or_path": str(Path(gguf).parent), "gguf_file": Path(gguf).name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # these weights are plain
    model.config.save_pretrained(folder)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    weights = {
        name: tensor.contiguous().clone()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    save_file(weights, Path(folder, "model.safetensors"), metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
